"""Optimizers and learning rate schedulers, resumed as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tools.models import build, run
from tools.optimizers import same, sgd, weights_of
from tools.ranks import on_ranks
from tools.restarts import validated
from tools.saving import Counting, filled
from torch import nn
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

from megapipe import PipelinedLRScheduler, PipelinedOptimizer, PostValidatedOptimizer, parallel_state
from megapipe.checkpoint import Checkpointer, load_optimizer, save_optimizer
from megapipe.checkpoint.fingerprints import fingerprint


class Slow(torch.optim.SGD):
    """A state key with a dot."""

    def step(self, closure: None = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("ema.%2E", torch.zeros_like(parameter)).add_(parameter.grad)


class Adding(torch.optim.SGD):
    """More in its state_dict() than torch's has."""

    t = 0

    def step(self, closure: None = None) -> None:
        self.t += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": self.t}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.t = state_dict.pop("t")
        super().load_state_dict(state_dict)


@pytest.mark.parametrize("make", [Slow, Counting, Adding])
def test_what_optimizers_keep_in_their_own_way(tmp_path: Path, make: type[torch.optim.Optimizer]) -> None:
    """Keys with a dot came back as another parameter's, state of no parameter and what an optimizer adds in its
    state_dict() not at all. torch's own state_dict() and load_state_dict() bring all three back."""
    layer = filled(1.0)
    optimizer = make(layer.parameters(), lr=0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(3):
        optimizer.step()
    Checkpointer(tmp_path, layer, PipelinedOptimizer(layer, lambda groups: optimizer)).save(3)
    loaded = make(layer.parameters(), lr=0.1)
    Checkpointer(tmp_path, layer, loaded).load()
    want, got = optimizer.state_dict(), loaded.state_dict()
    assert want.keys() == got.keys()
    assert fingerprint(want) == fingerprint(got)
    assert fingerprint(want) != fingerprint(make(layer.parameters(), lr=0.1).state_dict())


def test_what_an_optimizer_cannot_have_saved(tmp_path: Path) -> None:
    layer = filled(1.0)
    for key, message in (
        (nn.Parameter(torch.ones(3)), r"optimizer 0 has state of a tensor of shape \[3\], which is none of its"),
        (7, "optimizer 0 has state under 7, which cannot be saved: use a string"),
    ):
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        optimizer.state[key] = {"k": torch.tensor(0)}
        with pytest.raises(ValueError, match=message):
            Checkpointer(tmp_path, layer, optimizer).save(1)


@on_ranks(2)
def test_checkpoints_while_a_step_is_not_validated(rank: int, tmp_path: Path) -> None:
    """Loading finalized the step after the weights had been read, and rolled it back over them; saving without the
    optimizer saved weights that did not stand. Either way nothing was said."""
    chunks = build("1f1b", 2, 4)
    optimizer = validated(PostValidatedOptimizer(chunks, sgd, 1e-3), chunks)
    checkpointer = Checkpointer(f"{tmp_path}/whole", chunks, optimizer)
    checkpointer.save(0)
    saved = weights_of(chunks)
    run("1f1b", chunks, 2)
    optimizer.step()  # to be clipped, but nobody knows yet
    optimizer.zero_grad()
    assert optimizer.has_pending_step
    checkpointer.load()
    assert same(weights_of(chunks), saved)

    run("1f1b", chunks, 2)
    optimizer._waits = False
    optimizer.step()
    Checkpointer(f"{tmp_path}/model", chunks).save(1)
    assert not optimizer.has_pending_step
    expected = weights_of(chunks)
    Checkpointer(f"{tmp_path}/model", chunks).load()
    assert same(weights_of(chunks), expected)


def test_groups_without_parameters_keep_to_their_optimizer(tmp_path: Path) -> None:
    """A group without parameters, as Muon has on a rank without matrices, was found again by its number alone. It got
    the settings of another optimizer's group, which were logged as its learning rate."""
    layer = filled(1.0)
    empty, full = torch.optim.SGD([{"params": []}], lr=0.5), torch.optim.AdamW(layer.parameters(), lr=1e-3)
    Checkpointer(tmp_path, layer, [full, empty]).save(1)
    empty.param_groups[0]["lr"] = full.param_groups[0]["lr"] = 9.0
    Checkpointer(tmp_path, layer, [full, empty]).load()
    assert (empty.param_groups[0]["lr"], full.param_groups[0]["lr"]) == (0.5, 1e-3)
    assert "betas" not in empty.param_groups[0]


@on_ranks(1)
def test_optimizers_of_named_parameters(rank: int, tmp_path: Path) -> None:
    """The names that torch's optimizers may keep in their groups were saved as a setting. So no other arrangement of
    chunks could load them."""
    parallel_state.initialize_model_parallel()
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    halves = []
    for name, layer in zip("01", layers):
        halves.append(nn.Module())
        halves[-1].add_module(name, layer)
    Checkpointer(tmp_path, halves, [torch.optim.AdamW(half.named_parameters()) for half in halves]).save(1)
    whole = nn.Sequential(*layers)
    Checkpointer(tmp_path, [whole], torch.optim.AdamW(whole.named_parameters())).load()


def cyclic(optimizer: Any) -> CyclicLR:
    rates = [group["lr"] for group in optimizer.param_groups]
    return CyclicLR(optimizer, [rate / 10 for rate in rates], rates, step_size_up=3, cycle_momentum=False)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    minima = [group["lr"] / 4 for group in optimizer.param_groups]
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.7, min_lr=minima)


class Halving:
    """Of such functions a LambdaLR saves the attributes, in a list of rank 0's length."""

    def __call__(self, step: int) -> float:
        return 0.5**step


@on_ranks(2)
def test_schedulers_of_other_groups_are_resumed(rank: int, tmp_path: Path) -> None:
    """torch's own schedulers took over rank 0's learning rates for its groups on every rank, and so did a CyclicLR its
    bounds; one behind another scheduler went on with a wrong lower bound. Later steps had wrong rates, or failed."""
    folder = str(tmp_path)
    parallel_state.initialize_model_parallel(2)
    kinds: list[tuple[Any, bool]] = [(lambda one: LambdaLR(one, Halving()), False), (plateau, False), (cyclic, False)]
    kinds += [(lambda one: LambdaLR(one, lambda step: 0.5**step), True)]
    kinds += [(lambda one: SequentialLR(one, [LinearLR(one, 0.1, total_iters=2), cyclic(one)], [2]), True)]
    for number, (kind, is_pipelined) in enumerate(kinds):

        def make(number: int = number, kind: Any = kind, is_pipelined: bool = is_pipelined) -> tuple[Any, ...]:
            layer = nn.Linear(2, 2)
            chunk = nn.ModuleDict({str(rank): layer})
            optimizer = PipelinedOptimizer(
                [chunk], sgd, lambda _, p: {"lr": 1e-4 if rank + p.dim() == 1 else 0.1 + rank}
            )
            scheduler = PipelinedLRScheduler(optimizer, kind) if is_pipelined else kind(optimizer)
            return (
                optimizer,
                scheduler,
                Checkpointer(f"{folder}/{number}", [chunk], optimizer, others={"lr": scheduler}),
            )

        def train(optimizer: Any, scheduler: Any, num_steps: int = 3, kind: Any = kind) -> list[list[float]]:
            rates = []
            for _ in range(num_steps):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                scheduler.step(*([1.0] if kind is plateau else []))
                rates.append([group["lr"] for group in optimizer.param_groups])
            return rates

        optimizer, scheduler, checkpointer = make()
        train(optimizer, scheduler)
        checkpointer.save(1)
        expected = train(optimizer, scheduler)
        optimizer, scheduler, checkpointer = make()
        checkpointer.load()
        assert train(optimizer, scheduler) == expected, number
        assert expected[-1] == scheduler.get_last_lr()
        assert len(expected[0]) == 2 - rank
    with pytest.raises(TypeError, match="ReduceLROnPlateau steps by a metric"):
        PipelinedLRScheduler(optimizer, plateau)


def test_factored_state_of_parameters_in_parts(tmp_path: Path) -> None:
    """Optimizer state of another shape than its parameter is not cut into the parameter's parts, so every rank saved
    its own experts' under one name. All but one were lost, silently."""
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.ones(2, 4, 4))
    optimizer = torch.optim.Adafactor(experts.parameters())
    experts.weight.grad = torch.ones(2, 4, 4)
    optimizer.step()
    parts = lambda name, _, tensor: [(f"{name}.{n}", part) for n, part in enumerate(tensor)]  # noqa: E731
    with pytest.raises(ValueError, match=r"row_var of weight .* \[2, 4, 1\].*cannot be saved in parts"):
        Checkpointer(tmp_path, experts, optimizer, parts=parts).save(1)


# An optimizer saved without the model, into a folder that may be written again


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


@on_ranks(2)
def test_an_error_is_raised_on_all_ranks(rank: int, tmp_path: Path) -> None:
    parallel_state.initialize_model_parallel(2)
    chunk = nn.ModuleDict({str(rank): filled(1.0)})
    optimizer, _ = trained(chunk, 1)
    if rank == 1:
        optimizer.state["own"] = object()  # which no checkpoint can hold
    with pytest.raises((TypeError, ValueError)):
        save_optimizer(tmp_path / "optimizer", chunk, optimizer)
    assert not (tmp_path / "optimizer").exists()
