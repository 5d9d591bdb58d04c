"""Steps of reinforcement learning: packed microbatches of unequal lengths, of which each step has another number.
`make test-rl` runs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tools.ranks import on_ranks

pytest.importorskip("transformers")
pytest.importorskip("megatron")

import torch
from tools import hf_models, megatron_models
from tools.against import assert_close

import megapipe
from megapipe.integrations.megatron import build_model_chunks, global_name
from megapipe.integrations.transformers import build_chunks, load_weights, token_log_probs
from megapipe.proving.whole import Whole
from megapipe.training import log_probs_of, pack

NUMBERS = (4, 1, 13, 5, 2, 11, 3, 12, 6, 10, 7, 9, 8)
"""Microbatches of each step."""


def packed(number: int, seed: int) -> list[dict[str, Any]]:
    """Documents one behind the other, whose positions tell them apart."""
    generator = random.Random(seed)
    lengths = [2 + int(generator.lognormvariate(1.5, 0.6)) % 20 for _ in range(4 * number)]
    draw = torch.Generator().manual_seed(seed)
    found = []
    for numbers in pack(lengths, sum(lengths), number):
        positions = torch.cat([torch.arange(lengths[one]) for one in numbers])[None]
        tokens = torch.randint(3, hf_models.VOCABULARY, positions.shape, generator=draw)
        found.append({"input_ids": tokens, "position_ids": positions})
    return found


def loss_of(batch: dict[str, Any], logits: Any) -> tuple[Any, Any]:
    found = log_probs_of(logits[:, :-1], batch["input_ids"][:, 1:])
    counted = found * (batch["position_ids"][:, 1:] > 0)
    return counted.sum(), found.detach()


def forward_step(batches: Iterator[Any], chunk: Any) -> Any:
    batch = next(batches)
    return chunk(**batch), lambda logits: loss_of(batch, logits)


def whole_step(batches: Iterator[Any], model: Any) -> Any:
    batch = next(batches)
    return model(**batch, use_cache=False).logits, lambda logits: loss_of(batch, logits)


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@on_ranks(2)
def test_transformers(rank: int, schedule: str, tmp_path: Path) -> None:
    """Log-probabilities, which all ranks have, and all gradients are those of one process, in every step."""
    model = hf_models.make_model("qwen2")
    hf_models.save_on_first(model, tmp_path)
    hf_models.initialise(2)
    chunks = build_chunks(tmp_path, schedule, num_chunks=2, seed=None, variable_seq_lengths=True)
    load_weights(chunks, tmp_path)
    for chunk in chunks:
        megapipe.weight_grad.convert(chunk)
    sizes = {"seq_length": None, "micro_batch_size": None, "forward_step_func": forward_step}
    for step, number in enumerate(NUMBERS):
        microbatches = packed(number, step)
        known = token_log_probs(chunks, schedule, microbatches)
        reports = hf_models.run(schedule, chunks, microbatches, **sizes)
        for at, found in enumerate(Whole([model], whole_step).step(microbatches)):
            assert torch.equal(known[at], found)
            assert not reports or torch.equal(reports[at], found)
        hf_models.assert_same_gradients(chunks, model)
        for one in (model, *chunks):
            one.zero_grad()


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zbv"])
@on_ranks(2)
def test_megatron(rank: int, schedule: str) -> None:
    """Megatron's own function raises an error for most of these numbers."""
    options = {"variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall"}
    whole = megatron_models.provider(megatron_models.megatron(1))()
    chunks = build_model_chunks(megatron_models.provider(megatron_models.megatron(2, 2, **options)), schedule)
    from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving as megatrons

    expected = dict(whole.named_parameters())
    refused = []
    for step, number in enumerate(NUMBERS):
        lengths = [random.Random(step + at).randint(2, 24) for at in range(number)]
        data = megatron_models.batches(number, step, lengths)
        losses = megatron_models.step(megapipe.get_forward_backward_func(schedule), chunks, data)
        expected_losses = [float(one["loss"]) for one in Whole([whole], megatron_models.forward_step).step(data)]
        assert losses in ([], expected_losses)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                assert_close(parameter.grad, expected[global_name(chunk, name)].grad, 0.0, name)
        for one in (whole, *chunks):
            one.zero_grad()
        if schedule == "interleaved_1f1b":
            try:
                megatron_models.step(megatrons, chunks, data)
            except (RuntimeError, ValueError):
                refused.append(number)
            for one in chunks:
                one.zero_grad()
    assert schedule == "zbv" or refused == [number for number in NUMBERS if number % 2]
