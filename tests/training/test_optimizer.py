"""Optimizers, LR schedulers and scalers over several chunks as over one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tools.against import full
from tools.models import Stage, add_gradients, build, run
from tools.optimizers import adamw, decay, momentum, same, sgd, weights_of
from tools.ranks import on_ranks
from tools.restarts import validated
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, SequentialLR

from megapipe import (
    PipelinedGradScaler,
    PipelinedLRScheduler,
    PipelinedOptimizer,
    PostValidatedOptimizer,
    StageInfo,
    TiedWeights,
    parallel_state,
)

SCHEDULERS: list[Callable[[Any], Any]] = [
    lambda optimizer: OneCycleLR(optimizer, 1e-2, total_steps=20),  # which moves momenta too
    lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda n: 0.1 * (1 + n)), CosineAnnealingLR(optimizer, 10)], [2]
    ),
]


@on_ranks(2)
def test_several_chunks_as_one(rank: int) -> None:
    """Against torch's optimizer, scheduler and clipping on the unpartitioned model."""
    for schedule, make, make_scheduler in zip(("1f1b", "zbv"), (momentum, adamw), SCHEDULERS):
        chunks = build(schedule, 2, 4)
        optimizer = PipelinedOptimizer(chunks, make, decay)
        scheduler = PipelinedLRScheduler(optimizer, make_scheduler)
        whole = Stage(StageInfo(0, 1), 4)
        groups = [{"params": [p for p in whole.parameters() if p.dim() > 1]}]
        groups.append({"params": [p for p in whole.parameters() if p.dim() < 2], "weight_decay": 0.0})
        expected = make(groups)
        expected_scheduler = make_scheduler(expected)
        for step in range(4):
            run(schedule, chunks, 2, seed=step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            add_gradients(whole, 2, step)
            expected.step()
            expected.zero_grad()
            expected_scheduler.step()
            assert scheduler.get_last_lr()[0] == expected_scheduler.get_last_lr()[0]
        named = dict(whole.named_parameters())
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                assert torch.equal(parameter, named[name]), f"{schedule}: {name}"
                for key, value in optimizer.state[parameter].items():
                    assert torch.equal(value, expected.state[named[name]][key])
        if len(chunks) == 1:
            state = get_optimizer_state_dict(chunks[0], optimizer)["state"]
            assert set(state) == {name for name, _ in chunks[0].named_parameters()}
        assert optimizer.num_steps == 4


@on_ranks(2)
def test_one_weight_in_two_chunks_is_optimized_once(rank: int) -> None:
    chunks = build("zbv", 2, 8)
    if rank == 0:
        chunks[1].head.weight = chunks[0].embedding.weight
    optimizer = PipelinedOptimizer(chunks, adamw)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(parameters) == len({id(p) for chunk in chunks for p in chunk.parameters()})


@on_ranks(2)
def test_with_a_scaler(rank: int) -> None:
    """An Inf on one rank: all skip the step, the learning rate's too, and agree on the scale. tests/cases compares the
    weights."""
    chunks, scaler = build("zbv", 2, 4), PipelinedGradScaler("cpu", init_scale=2.0**10)
    for chunk in chunks:
        chunk.config.grad_scale_func = scaler.scale
    optimizer = PipelinedOptimizer(chunks, adamw)
    scheduler = PipelinedLRScheduler(optimizer, lambda one: LambdaLR(one, lambda n: 1 / (1 + n)))
    scales, rates = [], []
    for step in range(4):
        run("zbv", chunks, 2, seed=step)
        if step == 1 and rank == 1:
            next(chunks[0].parameters()).grad.view(-1)[0] = math.inf
        if step % 2:  # or the scaler does it in its step
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        rates += scheduler.get_last_lr()
    assert optimizer.num_steps == 3
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    assert rates == [1e-2 * (1 / n) for n in (2, 2, 3, 4)]


@on_ranks(2)
def test_a_scaler_of_whole_gradients_and_shards(rank: int) -> None:
    """Torch's function refuses to take both. A NaN in a shard is found on all ranks."""
    parallel_state.initialize_model_parallel()
    mesh = parallel_state.get_data_parallel_mesh()
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    fully_shard(model[0], mesh=mesh)
    optimizer, scaler = PipelinedOptimizer([model], sgd), PipelinedGradScaler("cpu", init_scale=8.0)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 8.0)
        if number == 0 and rank == 1:
            parameter.grad.to_local()[0, 0] = math.nan
    scaler.unscale_(optimizer)
    assert all((full(parameter.grad)[-1] == 1.0).all() for parameter in model.parameters())
    before = [full(parameter).clone() for parameter in model.parameters()]
    scaler.step(optimizer)
    assert same([full(parameter) for parameter in model.parameters()], before)


@on_ranks(2)
def test_torchs_own_scaler_is_refused(rank: int) -> None:
    """On the rank without the loss torch asked for scaler.scale(...). Where that was called everywhere, an Inf on one
    rank made that one skip the step and halve the scale, and the others went on."""
    chunks = build("1f1b", 2, 4)
    chunks[0].config.grad_scale_func = torch.amp.GradScaler("cpu").scale
    with pytest.raises(ValueError, match=r"only on the rank that finds an Inf, .* take a megapipe.PipelinedGradScaler"):
        run("1f1b", chunks, 2)
    chunks[0].config.grad_scale_func = torch.amp.GradScaler("cpu", enabled=False).scale
    run("1f1b", chunks, 2)
    chunks[0].config.grad_scale_func = torch.amp.GradScaler("cpu").scale  # also one that comes later
    with pytest.raises(ValueError, match=r"only on the rank that finds an Inf"):
        run("1f1b", chunks, 2)


def test_nothing_to_train() -> None:
    with pytest.raises(ValueError, match="there is nothing to optimize"):
        PipelinedOptimizer(nn.Linear(1, 1).requires_grad_(False), adamw)


@on_ranks(2)
def test_frozen_stages(rank: int) -> None:
    """A rank whose stages were all frozen could make no optimizer, and the others waited for it; what was unfrozen
    later was never trained, silently. A tied weight that was frozen on one rank only made the other wait forever."""
    parameters = build("1f1b", 2, 4)
    if rank == 0:
        parameters[0].requires_grad_(False)
    for is_post_validated in (False, True):
        optimizer = PipelinedOptimizer(parameters, sgd)
        if is_post_validated:
            optimizer = validated(PostValidatedOptimizer(parameters, sgd, 1e-3), parameters)
        scheduler = PipelinedLRScheduler(optimizer, lambda one: LambdaLR(one, lambda n: 0.5**n))
        before = weights_of(parameters)
        for step in range(2):
            run("1f1b", parameters, 2, seed=step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.finalize()
        assert same(weights_of(parameters), before) == (rank == 0)
    parameters[0].requires_grad_(True)
    before = weights_of(parameters)
    run("1f1b", parameters, 2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.finalize()
    assert not any(same([one], [other]) for one, other in zip(weights_of(parameters), before))
    assert all(parameter.grad is None for parameter in parameters[0].parameters())

    if rank == 0:
        parameters[0].embedding.requires_grad_(False)
    with pytest.raises(ValueError, match=r"tied parameters must be alike, but embedding.weight is frozen float32"):
        TiedWeights(parameters, ["embedding.weight", "head.weight"])


def test_a_scaler_that_is_switched_off() -> None:
    """It set up a scale on the device, though there is none where there is no such device."""
    assert PipelinedGradScaler("cuda", enabled=False).get_scale() == 1.0
