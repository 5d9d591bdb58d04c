"""Steps that are validated afterwards: bitwise those of the ordinary way."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from tools import models
from tools.models import Stage, batches, build, loss_of, run
from tools.optimizers import MAX_NORM, adamw, decay, momentum, same, sgd, weights_of
from tools.ranks import RankPool, on_ranks
from tools.restarts import counting_restarts, validated
from tools.saving import Counting
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import megapipe
from megapipe import (
    PipelineConfig,
    PipelinedLRScheduler,
    PipelinedOptimizer,
    PostValidatedOptimizer,
    clip_grad_norm_,
    parallel_state,
)
from megapipe.plan import ChannelName, make_plan
from megapipe.transports import GlooTransport
from megapipe.transports.channel import BackendChannel


def forward_step(data_iterator: Iterator[dict[str, Any]], model: Stage) -> tuple[Tensor, Any]:
    """A forward whose repetition would show: it draws random numbers, and counts in a buffer."""
    batch = next(data_iterator)
    state = torch.get_rng_state()
    output = model(batch["tokens"], batch["seed"])  # which sets the seed
    torch.set_rng_state(state)
    model.count += 1
    model.late = 1e-4 * torch.ones(()) if model.late is None else model.late + 1e-4
    drawn = torch.rand(()) + random.random() + numpy.random.rand()
    output = output * (1 + 0.01 * drawn) + 1e-4 * model.count + model.late

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = loss_of(output, batch["labels"])
        return loss, torch.tensor(3), {"loss": loss.detach()}

    return output, loss_func


def drawing(data: Iterator[Any]) -> Iterator[Any]:
    """Data that draw from the streams of random numbers that the model draws from, as augmentations do."""
    for item in data:
        torch.rand(()), random.random(), numpy.random.rand()
        yield item


class Accident:
    """finalize_model_grads_func: makes steps that are to be clipped or skipped, alike in every run."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.kinds: Counter[str] = Counter()
        self.is_calm = False

    def __call__(self, models: list[nn.Module], num_tokens: Tensor | None) -> None:
        # Long calm times, in which steps are not waited for, and times of trouble.
        if self.random.random() < 0.2:
            self.is_calm = not self.is_calm
        troubled = 0.15 if self.is_calm else 0.7
        kind = self.random.choice(["clip", "nan", "inf"]) if self.random.random() < troubled else "plain"
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        rank, factor = self.random.randrange(pp_size), self.random.uniform(50, 200)
        for chunk in models:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.grad *= factor if kind == "clip" else 0.05
        if kind in ("nan", "inf") and rank == parallel_state.get_pipeline_model_parallel_rank():
            next(models[0].parameters()).grad.view(-1)[-1] = math.nan if kind == "nan" else -math.inf
        self.kinds[kind] += 1


def train(
    schedule: str,
    pp_size: int,
    num_steps: int,
    make: Callable[..., Any],
    is_post_validated: bool,
    disturb: bool,
    seed: int,
) -> tuple[list[Any], list[dict[str, Tensor]], Counter[str]]:
    """The reports of all steps, and the weights, states and buffers at the end."""
    accident = Accident(seed)
    options = {"finalize_model_grads_func": accident}
    chunks = build(schedule, pp_size, 2 * pp_size, deferred=True, **options)
    for chunk in chunks:
        chunk.register_buffer("count", torch.zeros(()))
        chunk.register_buffer("late", None)
    if is_post_validated:
        optimizer: Any = validated(PostValidatedOptimizer(chunks, make, MAX_NORM, decay), chunks)
    else:
        optimizer = PipelinedOptimizer(chunks, make, decay)
    scheduler = PipelinedLRScheduler(optimizer, lambda optimizer: LambdaLR(optimizer, lambda n: 0.98**n))
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    numpy.random.seed(dist.get_rank())
    chance = random.Random(dist.get_rank())
    reports, rates = [], []
    for step in range(num_steps):
        m = (3, 3, 2)[step % 3]
        arguments = {"forward_step_func": forward_step, "seed": step, "data_iterator": drawing(batches(m, step))}
        reports.append(run(schedule, chunks, m, **arguments))
        if disturb and step % 7 == 3:
            reports.append(
                run(schedule, chunks, 2, **{**arguments, "data_iterator": batches(2, step)}, forward_only=True)
            )
        if is_post_validated:
            optimizer.step()
            if disturb and chance.random() < 0.3:
                optimizer.finalize()  # on some of the ranks, as when one prints
        else:
            norm = clip_grad_norm_(chunks, MAX_NORM)
            if norm.isfinite():
                optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if disturb and step % 10 == 9:  # validation right after a step
            reports.append(
                run(schedule, chunks, 2, **{**arguments, "data_iterator": batches(2, step)}, forward_only=True)
            )
    state = optimizer.state_dict()  # finalizes
    states = [state["state"][number] for number in sorted(state["state"])]
    rates.append({"lr": torch.tensor([group["lr"] for group in state["param_groups"]], dtype=torch.float64)})
    tensors = [dict(chunk.state_dict()) for chunk in chunks]
    return reports, tensors + states + rates, accident.kinds, optimizer.num_steps


class InOrderTransport(GlooTransport):
    """Gloo as NCCL is: messages from one rank to another are told apart by their order alone."""

    matches_by_order = True

    def channel(self, name: ChannelName, peer: int, sends: bool) -> BackendChannel:
        channel = super().channel(name, peer, sends)
        channel._tag = 1 if name.kind == "header" else 0
        return channel


def post_validated(
    rank: int, schedules: list[str], pp_size: int, num_steps: int, disturb: bool, seed: int
) -> list[tuple[int, Counter[str]]]:
    found = []
    for number, schedule in enumerate(schedules):
        arguments = (schedule, pp_size, num_steps, (adamw, momentum)[number % 2])
        with mock.patch("megapipe.transports.choice.GlooTransport", InOrderTransport if disturb else GlooTransport):
            expected = train(*arguments, False, disturb, seed)
            with counting_restarts() as restarts:
                result = train(*arguments, True, disturb, seed)
        assert result[0] == expected[0], f"{schedule}: losses differ"
        for one, other in itertools.zip_longest(result[1], expected[1]):
            for name in other:
                assert torch.equal(one[name], other[name]), f"{schedule}: {name} differs"
        assert result[2:] == expected[2:]
        found.append((len(restarts), expected[2]))
    return found


@pytest.mark.parametrize(
    ("schedules", "pp_size", "num_steps", "disturb", "seed"),
    [
        (["dualpipev"], 2, 12, True, 12),
        pytest.param(["zbv", "zb2p"], 2, 12, False, 12, marks=pytest.mark.soak),
        pytest.param(["zbv", "zb2p", "1f1b"], 2, 25, False, 2, marks=pytest.mark.soak),
        pytest.param(["zbv", "interleaved_1f1b", "dualpipev"], 4, 25, True, 4, marks=pytest.mark.soak),
    ],
)
def test_post_validated_steps(
    ranks: RankPool, schedules: list[str], pp_size: int, num_steps: int, disturb: bool, seed: int
) -> None:
    """`seed`: one whose steps hold each kind of accident twice."""
    for found in ranks.run(pp_size, post_validated, schedules, pp_size, num_steps, disturb, seed):
        for begun_again, kinds in found:
            assert begun_again >= 2
            assert min(kinds[kind] for kind in ("plain", "clip", "nan", "inf")) >= 2


@pytest.mark.parametrize(("name", "pp_size"), [("zb2p", 3), ("zbv", 6)])
def test_zero_bubble_schedules_hear_of_the_norm_in_time(name: str, pp_size: int) -> None:
    """On the plan: when a rank reaches its first backward, the last rank has long ended the step before."""
    plan = make_plan(name, pp_size, 4 * pp_size)
    spans = plan.simulate(num_steps=2).spans
    for rank in spans:
        second = rank[len(rank) // 2 :]
        first_backward = next(span.start for span in second if span.action.kind == "B")
        assert all(other[len(other) // 2 - 1].end <= first_backward for other in spans)
        assert second[0].start == rank[len(rank) // 2 - 1].end  # no bubble between the steps


@on_ranks(2)
def test_misuse(rank: int) -> None:
    chunks = build("1f1b", 2, 8)
    optimizer = validated(PostValidatedOptimizer(chunks, adamw, 100.0), chunks)
    with pytest.raises(ValueError, match="set_to_none=True"):
        optimizer.zero_grad(set_to_none=False)
    with pytest.raises(TypeError, match="takes no closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(ValueError, match="does not go with a data_iterator without"):
        run("1f1b", chunks, 2, data_iterator=range(2))
    optimizer.max_norm = 1e-6  # so that the step is to be made again
    run("1f1b", chunks, 2)
    optimizer.step()
    for chunk in chunks:
        chunk.zero_grad(set_to_none=False)
    with pytest.raises(RuntimeError, match="changed in place"):
        optimizer.finalize()


@on_ranks(2)
def test_an_optimizer_that_changes_gradients(rank: int) -> None:
    """It was noticed in the first step that was to be clipped, with a remedy that did not help."""
    chunks = build("1f1b", 2, 8)
    nesterov = partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True)
    optimizer = validated(PostValidatedOptimizer(chunks, nesterov, 100.0), chunks)
    run("1f1b", chunks, 2)
    with pytest.raises(RuntimeError, match=r"SGD has changed gradients in its step, .*: pass foreach=False"):
        optimizer.step()


class Adding(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "t": 0}


class CountingInGroups(torch.optim.SGD):
    """Keeps a count among its settings, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


@on_ranks(2)
def test_what_an_optimizer_counts_is_rolled_back(rank: int) -> None:
    """An optimizer that keeps something under a name of its own, as MADGRAD does, failed in its second step. A skipped
    step left in the groups what it had put there. What is kept elsewhere cannot be rolled back, and is refused."""
    parallel_state.initialize_model_parallel(2)
    layer = nn.Linear(2, 2)
    for kind in (Counting, CountingInGroups):
        optimizer = PostValidatedOptimizer(layer, partial(kind, lr=0.1), max_norm=1.0)
        for gradient in (0.1, 5.0, math.nan, 0.1):  # as it is, clipped, skipped, as it is
            for parameter in layer.parameters():
                parameter.grad = torch.full_like(parameter, gradient)
            optimizer.step()
            optimizer.finalize()
            optimizer.zero_grad()
        assert {**optimizer.state_dict()["state"], **optimizer.param_groups[0]}["k"] == optimizer.num_steps == 3
    with pytest.raises(
        ValueError, match=r"Adding adds \['t'\] in its state_dict\(\), of which a step cannot be rolled"
    ):
        PostValidatedOptimizer(layer, partial(Adding, lr=0.1), max_norm=1.0)


@on_ranks(2)
def test_every_rank_or_none_validates_afterwards(rank: int) -> None:
    chunks = build("1f1b", 2, 8)
    optimizer = PipelinedOptimizer(chunks, adamw)
    if rank:
        optimizer = validated(PostValidatedOptimizer(chunks, adamw, 1.0), chunks)
    with pytest.raises(ValueError, match="disagree on whether a PostValidatedOptimizer trains the model"):
        run("1f1b", chunks, 2)
    optimizer.zero_grad()


@on_ranks(2)
def test_steps_that_no_schedule_validates(rank: int) -> None:
    """Whoever forgets to give the optimizer to the config must not train on with steps that do not stand."""
    chunks = build("1f1b", 2, 8)
    optimizer = PostValidatedOptimizer(chunks, adamw, 1e-6)  # each step is to be clipped
    run("1f1b", chunks, 2)
    optimizer.step()
    optimizer.zero_grad()
    run("1f1b", chunks, 2, seed=1)
    with pytest.raises(RuntimeError, match=r"has not been validated: set config\.post_validated_optimizer to it"):
        optimizer.step()
    optimizer.finalize()
    optimizer.step()

    with pytest.raises(TypeError, match=r"must be a megapipe\.PostValidatedOptimizer, or None, got AdamW"):
        PipelineConfig(post_validated_optimizer=optimizer.optimizer)
    chunks[0].config.post_validated_optimizer = optimizer
    assert copy.deepcopy(chunks[0]).config.post_validated_optimizer is optimizer
    assert PipelineConfig.of(object()).post_validated_optimizer is None


@on_ranks(2)
def test_chunks_in_another_form(rank: int) -> None:
    """The schedule did not find the PostValidatedOptimizer of chunks that were given to it as a ModuleList. Steps that
    should have been clipped stood for one step more, silently."""
    weights = []
    for form in (list, nn.ModuleList):
        chunks = build("1f1b", 2, 2)
        optimizer = validated(PostValidatedOptimizer(form(chunks), sgd, 1e-3), chunks)
        for step in range(2):
            run("1f1b", form(chunks), 2, seed=step)
            optimizer._waits = False
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finalize()
        weights.append(weights_of(chunks))
    assert same(*weights)


WRITES: dict[str, Callable[[nn.Module], Any]] = {
    "in place": lambda layer: layer.weight.detach().clamp_(-0.1, 0.1),
    "other memory": lambda layer: setattr(layer.weight, "data", layer.weight.detach().clone()),
    "another parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight.detach().clone())),
}


@pytest.mark.parametrize("way", WRITES)
@on_ranks(2)
def test_weights_that_are_written_to_too_early(rank: int, way: str) -> None:
    """What was written between a step and the next call was lost in a rollback, without a word. That is refused now,
    also where the step would stand."""
    chunks = build("1f1b", 2, 2)
    optimizer = validated(PostValidatedOptimizer(chunks, sgd, math.inf), chunks)
    layer = next(module for module in chunks[0].modules() if isinstance(module, nn.Linear))
    run("1f1b", chunks, 2)
    optimizer.step()
    optimizer.zero_grad()
    WRITES[way](layer)
    dist.barrier()  # a rank that is refused first would end the optimizer step of the other
    for call in (optimizer.finalize, optimizer.state_dict, lambda: run("1f1b", chunks, 2)):
        with pytest.raises(RuntimeError, match=r"weight was written to, or exchanged, between the step of"):
            call()


def calls_of_void_steps(schedule: str, max_norm: float) -> tuple[Any, list[Tensor], int]:
    """What is called in three steps without `zero_grad`, each of which begins before the step before is validated."""
    calls: Counter[str] = Counter()
    recorder = megapipe.TimelineRecorder()
    chunks = build(
        schedule,
        2,
        4,
        deferred=True,
        grad_sync_func=lambda parameters: calls.update(["sync"]),
        finalize_model_grads_func=lambda *_: calls.update(["finalize"]),
        record_timeline=recorder,
    )
    if max_norm == math.inf:
        optimizer: Any = PipelinedOptimizer(chunks, momentum)
    else:
        optimizer = validated(PostValidatedOptimizer(chunks, momentum, max_norm), chunks)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.register_hook(lambda grad: calls.update(["gradient"]))
    reports, num_forwards = [], 0
    for step in range(3):

        def forward(*args: Any) -> Any:
            nonlocal num_forwards
            num_forwards += 1
            return models.forward_step(*args)

        reports.append(run(schedule, chunks, 3, forward_step_func=forward, seed=step))
        if max_norm == math.inf:
            clip_grad_norm_(chunks, 1e-2)
        else:
            optimizer._waits = False
        optimizer.step()
    optimizer.finalize()
    return (calls, reports, len(recorder._records)), weights_of(chunks), num_forwards


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@on_ranks(2)
def test_void_steps_leave_nothing_behind(rank: int, schedule: str) -> None:
    """A step on weights that are rolled back goes on to its end. Nobody may be told of gradients in it, and those from
    before it stay."""
    wanted = calls_of_void_steps(schedule, math.inf)
    found = calls_of_void_steps(schedule, 1e-2)
    assert found[0] == wanted[0]
    assert same(found[1], wanted[1])
    assert found[2] == wanted[2] // 3 * 5  # two of three steps were void
