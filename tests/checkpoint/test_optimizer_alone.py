"""An optimizer saved without the model, into a folder that may be written again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tools.ranks import RankPool, on_ranks
from tools.saving import filled
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from megapipe import parallel_state
from megapipe.checkpoint import load_optimizer, save_optimizer
from megapipe.checkpoint.fingerprints import fingerprint


def trained(layer: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, LambdaLR]:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    scheduler = LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for _ in range(steps):
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        scheduler.step()
    return optimizer, scheduler


def test_a_folder_is_written_again_and_weights_stay(tmp_path: Path) -> None:
    """A run's folder refuses a step that it has: trainers that save into checkpoint-4 again could not."""
    layer, other = filled(1.0), filled(2.0)
    for steps in (1, 3):
        optimizer, scheduler = trained(layer, steps)
        save_optimizer(tmp_path / "a" / "optimizer.new", layer, optimizer, {"lr": scheduler})
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["optimizer.new"]
    loaded, lr = trained(other, 0)
    before = torch.get_rng_state()
    load_optimizer(tmp_path / "a" / "optimizer.new", other, loaded, {"lr": lr})
    assert torch.equal(before, torch.get_rng_state())
    assert fingerprint(loaded.state_dict()) == fingerprint(optimizer.state_dict())
    assert lr.state_dict()["last_epoch"] == 3
    assert torch.equal(other.weight, filled(2.0).weight)


def test_what_is_no_such_folder_is_refused(tmp_path: Path) -> None:
    optimizer, _ = trained(layer := filled(1.0), 1)
    with pytest.raises(ValueError, match="is no folder"):
        load_optimizer(tmp_path / "nothing", layer, optimizer)
    save_optimizer(tmp_path / "one", layer, optimizer)
    with pytest.raises(ValueError, match="has no state of"):
        load_optimizer(tmp_path / "one", layer, optimizer, {"lr": trained(layer, 0)[1]})


def chunk_of(rank: int, size: int) -> nn.ModuleDict:
    """Layers of four, with the whole model's names."""
    per_rank = 4 // size
    return nn.ModuleDict({str(n): filled(float(n)) for n in range(rank * per_rank, (rank + 1) * per_rank)})


def save_by_ranks(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(2)
    chunk = chunk_of(rank, 2)
    save_optimizer(folder, chunk, trained(chunk, 2)[0])


def test_one_process_goes_on_from_two(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, save_by_ranks, tmp_path / "optimizer")
    whole = chunk_of(0, 1)
    wanted, (loaded, _) = trained(chunk_of(0, 1), 2)[0], trained(whole, 0)
    load_optimizer(tmp_path / "optimizer", whole, loaded)
    for index, state in wanted.state_dict()["state"].items():
        assert fingerprint(loaded.state_dict()["state"][index]) == fingerprint(state)


@on_ranks(2)
def test_an_error_is_raised_on_all_ranks(rank: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel(2)
    chunk = chunk_of(rank, 2)
    optimizer, _ = trained(chunk, 1)
    if rank == 1:
        optimizer.state["own"] = object()  # which no checkpoint can hold
    with pytest.raises((TypeError, ValueError)):
        save_optimizer(tmp_path / "optimizer", chunk, optimizer)
    assert not (tmp_path / "optimizer").exists()
