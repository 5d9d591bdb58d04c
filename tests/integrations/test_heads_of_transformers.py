"""Heads that give scores to tokens or sequences, as critics and reward models have them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")

import torch
import transformers
from tools import hf_models
from torch import nn

import megapipe
from megapipe.integrations.transformers import build_chunks, count_items, load_weights, save_pretrained

KINDS = ("TokenClassification", "SequenceClassification")


def make(kind: str, **options: Any) -> Any:
    config = hf_models.make_config("qwen2", pad_token_id=0, num_labels=3, **options)
    torch.manual_seed(0)
    return getattr(transformers, f"AutoModelFor{kind}").from_config(config).eval()


def batches_for(kind: str, number: int) -> list[dict[str, Any]]:
    found = []
    for batch in hf_models.batches(number):
        labels = batch["input_ids"] % 3
        found.append({"input_ids": batch["input_ids"], "labels": labels[:, 0] if "Seq" in kind else labels})
    return found


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_scores_of_tokens_and_sequences(rank: int, kind: str, schedule: str, tmp_path: Path) -> None:
    """Losses and gradients are the whole model's, and its own class loads what is saved."""
    model = make(kind)
    hf_models.save_on_first(model, tmp_path / "given")
    chunks = [chunk.eval() for chunk in hf_models.load_chunks(tmp_path / "given", schedule)]
    assert isinstance(chunks[0], type(model))
    for chunk in chunks:
        megapipe.weight_grad.convert(chunk)
    hf_models.compare(schedule, chunks, model, batches_for(kind, 4))
    save_pretrained(chunks, tmp_path / "saved")
    if rank == 0:
        hf_models.assert_same_weights(type(model).from_pretrained(tmp_path / "saved"), model)


@on_ranks(2)
def test_a_value_head_on_a_model_of_language(rank: int, tmp_path: Path) -> None:
    """A critic begins as the actor, with a new head, which is drawn; it has a loss of its own."""
    hf_models.save_on_first(hf_models.make_model("qwen2"), tmp_path)
    hf_models.initialise(2)
    config = hf_models.make_config("qwen2", num_labels=1)
    config.architectures = ["Qwen2ForTokenClassification"]
    chunks = build_chunks(config, "zbv", seed=5, dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_weights(chunks, tmp_path)
    told = [str(one.message) for one in caught if "no weights for score." in str(one.message)]
    assert len(told) == (rank == 0)
    tokens = [batch["input_ids"] for batch in hf_models.batches(4)]

    def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
        ids = next(batches)
        return chunk(input_ids=ids), lambda values: ((loss := (values.squeeze(-1) - 1).square().mean()), loss.detach())

    hf_models.run("zbv", chunks, tokens, forward_step_func=forward_step)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert parameter.grad is not None, name
    if rank == 0:
        (last,) = (chunk for chunk in chunks if chunk.stage.is_last)
        assert isinstance(last.score, nn.Linear)
        assert last.score.out_features == 1


@on_ranks(1)
def test_items_are_not_counted(rank: int) -> None:
    """The loss of classifiers is a mean whatever it is told."""
    hf_models.initialise(1)
    config = hf_models.make_config("llama", num_labels=3)
    config.architectures = ["LlamaForTokenClassification"]
    chunks = build_chunks(config, "1f1b")
    with pytest.raises(ValueError, match="is the mean over its microbatch"):
        hf_models.run("1f1b", chunks, count_items(batches_for("TokenClassification", 1)))
