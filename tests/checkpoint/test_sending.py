"""Weights of any chunks, sent by name."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tools.megatron_models import megatron, provider
from tools.models import build, reference
from tools.ranks import on_ranks
from torch import nn

from megapipe.checkpoint import named_weights


@on_ranks(4)
def test_replicas_in_a_v_and_a_weight_of_two_stages(rank: int) -> None:
    """By the name that two stages have for it, the weight comes from the first of them, once."""
    chunks = build("zbv", 2, 8)
    whole = dict(reference(8, 1)[0].named_parameters())
    for chunk in chunks:
        if chunk.embedding is not None or chunk.head is not None:
            chunk.tied = nn.Parameter(torch.full((3,), float(chunk.embedding is None)))
    found = list(named_weights(chunks, to=range(1, 4), bucket_size=3000))
    if rank == 0:
        assert found == []
        return
    assert [name for name, _ in found].count("tied") == 1
    by_name = dict(found)
    assert torch.equal(by_name.pop("tied"), torch.zeros(3))
    assert by_name.keys() == whole.keys()
    assert all(torch.equal(by_name[name], parameter) for name, parameter in whole.items())


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="make test installs megatron-core")
@pytest.mark.parametrize(("schedule", "vp_size"), [("1f1b", None), ("zbv", 2)])
@on_ranks(2)
def test_megatrons_names(rank: int, schedule: str, vp_size: int | None) -> None:
    """They are the whole model's, and the copy of a tied embedding does not come."""
    from megapipe.integrations.megatron import build_model_chunks, global_name

    config = megatron(2, vp_size)
    chunks = build_model_chunks(provider(config, is_tied=True), schedule)
    found = dict(named_weights(chunks, global_name=global_name, dtype=torch.bfloat16))
    whole = dict(provider(megatron(1), is_tied=True)().named_parameters())
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], parameter.bfloat16()) for name, parameter in whole.items())
