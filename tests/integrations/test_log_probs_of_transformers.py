"""Log-probabilities of tokens on all ranks, in the arithmetic of training steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
from tools import hf_models

from megapipe.integrations.transformers import token_log_probs
from megapipe.training import log_probs_of


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_they_are_those_of_training_steps(rank: int, schedule: str, tmp_path: Path) -> None:
    """On every rank, of microbatches of several lengths, one of them padded; and training goes on as before."""
    model, chunks = hf_models.load_both("qwen2", tmp_path, schedule)
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(3, hf_models.VOCABULARY, (2, length), generator=generator) for length in (12, 5, 9)]
    microbatches: list[dict[str, Any]] = [{"input_ids": one, "labels": one} for one in tokens]
    microbatches[1]["attention_mask"] = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    found = token_log_probs(chunks, schedule, microbatches)
    inputs = [{name: value for name, value in one.items() if name != "labels"} for one in microbatches]
    expected = [log_probs_of(model(**one).logits[:, :-1], one["input_ids"][:, 1:]) for one in inputs]
    assert all(torch.equal(one, want) for one, want in zip(found, expected, strict=True))

    def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
        batch = next(batches)
        return chunk(**batch), lambda logits: (
            (of := log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])).sum(),
            of.detach(),
        )

    sizes = {"seq_length": None, "micro_batch_size": None, "forward_step_func": forward_step}
    chunks[0].config.variable_seq_lengths = True
    reports = hf_models.run(schedule, chunks, inputs, **sizes)
    assert len(reports) == (3 if any(chunk.stage.is_last for chunk in chunks) else 0)
    assert all(torch.equal(one, want) for one, want in zip(reports, found))
    for one in expected:
        (one.sum() / 3).backward()
    hf_models.assert_same_gradients(chunks, model)
