"""Log-probabilities of all tokens by a model that lies on several ranks, on each of these."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from ...schedules import get_forward_backward_func
from ...training import log_probs_of


def token_log_probs(
    chunks: Sequence[Any], schedule: Any, microbatches: Sequence[Mapping[str, Any]], temperature: float = 1.0
) -> list[Tensor]:
    """How likely each token was behind those before it: what policies are compared by, as of GRPO and PPO, and teachers
    and students. Forward only. Every rank of the pipeline calls it with the same microbatches, of any lengths.

    The arithmetic is that of training steps, so the numbers are those that a loss function on the last stage finds by
    `log_probs_of` before the weights change. Call `chunk.eval()` first, and train so too, if the model has dropout.

    Args:
        chunks: this rank's. On the last stage they return logits [sequences, tokens, vocabulary]: those of
            `build_chunks`, or Megatron's.
        schedule: the one that they were built for.
        microbatches: as the model is called, with `input_ids`. Labels are left out.
        temperature: by which logits are divided.

    Returns:
        For each microbatch [sequences, tokens - 1] in float32, on every rank: the first number is that of the second
        token. Behind padding, and at the first token of a packed document, numbers mean nothing.
    """

    def forward_step(data_iterator: Iterator[Mapping[str, Any]], chunk: Any) -> tuple[Any, Any]:
        batch = {name: value for name, value in next(data_iterator).items() if name not in _OF_LOSSES}

        def loss_func(logits: Tensor) -> tuple[float, Tensor]:
            return 0.0, log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:], temperature)

        return chunk(**batch), loss_func

    with _reporting_to_all(chunks[0].config):
        return get_forward_backward_func(schedule)(
            forward_step_func=forward_step,
            data_iterator=[iter(microbatches) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(microbatches),
            forward_only=True,
        )


_OF_LOSSES = ("labels", "num_items_in_batch")


@contextmanager
def _reporting_to_all(config: Any) -> Iterator[None]:
    """Let the reports of steps come to all ranks, and microbatches have any lengths, masks and positions."""
    names = ("broadcast_reports", "variable_seq_lengths")
    before = {name: getattr(config, name, False) for name in names}  # Megatron's config has not all
    try:
        for name in names:
            setattr(config, name, True)
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
