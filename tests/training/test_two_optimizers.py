"""Muon for matrices of layers beside AdamW, as docs/howto/muon.md has it, against the unpartitioned model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.models import build, reference, run
from tools.ranks import on_ranks
from torch import nn

import megapipe
from megapipe.checkpoint import Checkpointer

muon: Any = getattr(torch.optim, "Muon", None)


def is_muons(name: str, parameter: nn.Parameter) -> bool:
    return parameter.dim() == 2 and "layers.1" in name  # of which the first rank has none


def both(chunks: list[Any]) -> list[megapipe.PipelinedOptimizer]:
    def make(kind: Any, wants: bool) -> megapipe.PipelinedOptimizer:
        return megapipe.PipelinedOptimizer(
            chunks,
            lambda groups: kind([one for one in groups if one["is_muons"] == wants] or [{"params": []}], lr=1e-2),
            group_of=lambda name, p: {"is_muons": is_muons(name, p)},
        )

    return [make(muon, True), make(torch.optim.AdamW, False)]


class MuonAndAdamW(torch.optim.Optimizer):
    """Both in one object: they share its groups and its state."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"is_muons": False})
        kinds = {True: muon, False: torch.optim.AdamW}
        self.parts = [kinds[group["is_muons"]]([group], lr=1e-2) for group in self.param_groups]
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Loading gives it other groups and another state."""
        super().__setstate__(state)
        for part, group in zip(self.parts, self.param_groups):
            part.param_groups, part.state = [group], self.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step()


def as_one(chunks: list[Any]) -> list[megapipe.PipelinedOptimizer]:
    return [megapipe.PipelinedOptimizer(chunks, MuonAndAdamW, lambda name, p: {"is_muons": is_muons(name, p)})]


def step(chunks: list[Any], optimizers: list[Any]) -> None:
    run("1f1b", chunks, 4)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.skipif(muon is None, reason="torch.optim.Muon is not in this torch")
@pytest.mark.parametrize("make", [both, as_one])
@on_ranks(2)
def test_as_in_one_process_and_resumed(rank: int, make: Any, tmp_path: Path) -> None:
    """Also on a rank that has nothing for Muon."""
    chunks = build("1f1b", 2, 2)
    optimizers = make(chunks)
    sorted_in = [group["is_muons"] for one in optimizers for group in one.param_groups if group["params"]]
    assert sorted(sorted_in) == ([False, True] if rank == 1 else [False])
    whole, _ = reference(2, 4)
    named = dict(whole.named_parameters())
    own = [
        muon([p for name, p in named.items() if is_muons(name, p)], lr=1e-2),
        torch.optim.AdamW([p for name, p in named.items() if not is_muons(name, p)], lr=1e-2),
    ]
    with Checkpointer(tmp_path, chunks, optimizers) as checkpointer:
        step(chunks, optimizers)
        for optimizer in own:
            optimizer.step()
        checkpointer.save(1)
        after_one = {name: p.clone() for chunk in chunks for name, p in chunk.named_parameters()}
        step(chunks, optimizers)
    for name, parameter in after_one.items():
        assert torch.equal(parameter, named[name]), name
    again = build("1f1b", 2, 2)
    others = make(again)
    with Checkpointer(tmp_path, again, others) as checkpointer:
        assert checkpointer.load().step == 1
        step(again, others)
    for one, other in zip(chunks, again):
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), other.parameters()))
