"""Mixtures of experts of transformers: as captured stages, and with weight gradients left to W."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from tools import hf_models
from tools.graphs import skip_without_tracer
from tools.ranks import on_ranks

from megapipe import weight_grad
from megapipe.graph import capture
from megapipe.integrations.transformers import build_chunks
from megapipe.weight_grad import DeferredGrads

skip_without_tracer()

EACH = [("deepseek-v3", "grouped_mm"), ("qwen3-moe", "batched_mm"), ("mixtral", "megapipe")]
"""Each kind, and each implementation. All pairs of them: `make soak`."""
PAIRS = EACH + [
    pytest.param(kind, experts, marks=pytest.mark.soak)
    for kind, experts in itertools.product(*zip(*EACH))
    if (kind, experts) not in EACH
]
OPTIONS: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": "eager"}


def make_chunk(name: str, experts: str) -> Any:
    """One layer, of experts."""
    changes = {"deepseek-v3": {"first_k_dense_replace": 0}, "qwen3-moe": {"mlp_only_layers": []}, "mixtral": {}}
    options = {"output_router_logits": False, **changes[name]} if name != "deepseek-v3" else changes[name]
    config = hf_models.make_config(name, num_hidden_layers=1, **options)
    (chunk,) = build_chunks(config, "1f1b", experts_implementation=experts, **OPTIONS)
    return weight_grad.convert(chunk)


def capture_chunk(chunk: Any) -> Any:
    (batch,) = hf_models.batches(1)
    return capture(chunk, (batch["input_ids"], None, None, batch["labels"], None))


def gradients(chunk: Any) -> dict[str, torch.Tensor]:
    hf_models.run("1f1b", [chunk], hf_models.batches(2))
    return {name: parameter.grad for name, parameter in chunk.named_parameters() if parameter.grad is not None}


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit, but with torch 2.9, whose graphs have a softmax's gradient by its parts."""
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6) if is_old else torch.equal(found, expected)


@pytest.mark.parametrize(("name", "experts"), PAIRS)
@on_ranks(1)
def test_captured(rank: int, name: str, experts: str) -> None:
    hf_models.initialise(1)
    expected, found = gradients(make_chunk(name, experts)), gradients(capture_chunk(make_chunk(name, experts)))
    assert expected.keys() == found.keys()
    assert all(same(found[key], expected[key]) for key in expected)


@on_ranks(1)
def test_a_loop_over_those_with_tokens_is_refused(rank: int) -> None:
    hf_models.initialise(1)
    with pytest.raises(ValueError, match=r"mixtral.py:\d+ \(for expert_idx in expert_hit:\) it goes by the values"):
        capture_chunk(make_chunk("mixtral", "eager"))


@on_ranks(1)
def test_weight_gradients_are_left_to_w(rank: int) -> None:
    hf_models.initialise(1)
    expected = gradients(make_chunk("deepseek-v3", "grouped_mm"))
    chunk = make_chunk("deepseek-v3", "megapipe")
    found = gradients(chunk)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-8)
    chunk.zero_grad()
    (batch,), deferred = hf_models.batches(1), DeferredGrads()
    with deferred:
        chunk(**batch).backward()
    left = [name for name, parameter in chunk.named_parameters() if parameter.grad is None and name in found]
    assert [name for name in left if "experts.down" in name and "shared" not in name] == [
        "model.layers.0.mlp.experts.down_proj"
    ]
    deferred.run()
