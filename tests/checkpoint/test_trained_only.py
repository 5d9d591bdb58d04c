"""Checkpoints of what is trained, without the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tools.models import build, run
from tools.ranks import on_ranks

import megapipe
from megapipe.checkpoint import Checkpointer, save_safetensors


def frozen_but_for(part: str) -> tuple[list[Any], Any]:
    """Chunks of which the parameters with `part` in their name are trained, in an optimizer that holds all."""
    chunks = build("1f1b", 2, 4)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(part in name)
        chunk.register_buffer("scale", torch.ones(2))  # in a module with nothing that is trained
        for layer in chunk.layers.values():
            layer.up.register_buffer("mean", torch.zeros(2))
    return chunks, megapipe.PipelinedOptimizer(chunks, lambda groups: torch.optim.AdamW(groups, lr=1e-2))


def step(chunks: list[Any], optimizer: Any) -> None:
    run("1f1b", chunks, 4)
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_run_goes_on_with_what_is_trained(rank: int, tmp_path: Path) -> None:
    """An optimizer may hold frozen parameters too; what was not saved stays as it is. A checkpoint of everything has
    what is trained."""
    chunks, optimizer = frozen_but_for(".up.")
    with Checkpointer(tmp_path / "trained", chunks, optimizer, trained_only=True) as checkpointer:
        step(chunks, optimizer)
        for layer in chunks[0].layers.values():
            layer.up.mean += 3
        checkpointer.save(1)
        step(chunks, optimizer)
    Checkpointer(tmp_path / "all", chunks, optimizer).save(2)
    for folder, num_steps in (("trained", 1), ("all", 0)):
        other, own = frozen_but_for(".up.")
        assert Checkpointer(tmp_path / folder, other, own, trained_only=True).load().step == 2 - num_steps
        for _ in range(num_steps):
            step(other, own)
        state = other[0].state_dict()
        for name, tensor in chunks[0].state_dict().items():
            assert torch.equal(state[name], tensor), (folder, name)
    with pytest.raises(ValueError, match="has no model"):
        Checkpointer(tmp_path / "trained", other).load()
    if rank == 0:
        save_safetensors(tmp_path / "trained", tmp_path / "file")
        names = load_file(tmp_path / "file/model.safetensors")
        assert sorted(names) == sorted(f"layers.{n}.up.{key}" for n in range(4) for key in ("weight", "bias", "mean"))
