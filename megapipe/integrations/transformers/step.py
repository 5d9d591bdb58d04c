"""What a training step needs besides the chunks: the forward step, the number of tokens, tied weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ... import parallel_state
from ...training import TiedWeights
from .boundaries import CannotCutError

Batch = Mapping[str, Any]


def forward_step(data_iterator: Iterator[Batch] | None, chunk: nn.Module) -> tuple[Any, Any]:
    """The `forward_step_func` for chunks of `build_chunks`.

    Args:
        data_iterator: yields what the model is called with: `input_ids` and `labels`, [batch, sequence], the same as
            in transformers, and if needed `attention_mask`, `position_ids`, ... All ranks of a pipeline read the same,
            or None for stages in the middle: masks and positions travel. With `num_items_in_batch` (see `count_items`;
            with replicas there must be) losses are divided by it, otherwise each is the mean over its microbatch, and
            divided by the number of microbatches.
    """
    batch = {} if data_iterator is None else next(data_iterator)
    return chunk(**batch), partial(_loss_func, batch)


def _loss_func(batch: Batch, loss: Tensor) -> Any:
    report = {"loss": loss.detach()}
    num_items = batch.get("num_items_in_batch")
    num_replicas = parallel_state.get_data_parallel_world_size() if dist.is_initialized() else 1
    if num_items is None:
        if num_replicas > 1 and loss.requires_grad:
            raise ValueError(
                f"with {num_replicas} replicas microbatches need num_items_in_batch: pass count_items(microbatches)."
            )
        return loss, report
    if num_replicas > 1:
        loss = loss * num_replicas  # gradients are averaged over them
    # Of the whole batch's tokens, times replicas: gradients are divided already, and who divides those that have been
    # averaged by the tokens of a replica, or added up ones by the tokens of all, divides them by one.
    share = _num_predicted(batch).double() / num_items * num_replicas
    return loss, share, report


def _num_predicted(batch: Batch) -> Tensor:
    """Tokens that the loss is a sum over. The models shift labels by themselves."""
    labels: Tensor = batch["labels"][..., 1:] if batch.get("shift_labels") is None else batch["shift_labels"]
    return (labels != -100).sum()


def count_items(microbatches: Sequence[Batch], group: dist.ProcessGroup | None = None) -> list[dict[str, Any]]:
    """Tell the microbatches of a step how many tokens are predicted in all of them, in all replicas: each token then
    weighs the same, as in transformers' Trainer. Every rank that reads data calls it.

    Args:
        microbatches: of this replica, for one step.
        group: the replicas; None takes that of `parallel_state`.
    """
    total = sum((_num_predicted(batch) for batch in microbatches[1:]), _num_predicted(microbatches[0]))
    if dist.is_initialized():
        dist.all_reduce(total, group=group or parallel_state.get_data_parallel_group())
    return [{**batch, "num_items_in_batch": total} for batch in microbatches]


def tied_names(model: Any) -> dict[str, str]:
    """The names of parameters that are tied, each with the one it is tied to."""
    return dict(model.all_tied_weights_keys or {})


def names_between_stages(model: Any) -> list[str]:
    """The names of the one weight that several stages have, of which one reads it before the layers and one behind."""
    if model.flow is None:
        return []
    groups: dict[str, list[str]] = {}
    for name, source in tied_names(model).items():
        groups.setdefault(source, [source]).append(name)
    apart = [
        names for names in groups.values() if len({frozenset(model.flow.course.used.get(n, ())) for n in names}) > 1
    ]
    if len(apart) > 1:
        raise CannotCutError(
            f"{type(model).__name__} cannot be cut into stages: it ties {' and '.join(map(str, apart))} across them, "
            "and only one weight can be."
        )
    return apart[0] if apart else []


def tie_weights(chunks: Sequence[nn.Module]) -> TiedWeights | None:
    """Tie the embedding to the head, where the model's config says so. Every rank calls it.

    `build_chunks` has done so. Steps sum the gradients by themselves. None where the model ties nothing.
    """
    names = names_between_stages(chunks[0])
    tied = TiedWeights(chunks, names) if names else None
    if tied is not None:
        tied.sum_in_steps(chunks)
    return tied
