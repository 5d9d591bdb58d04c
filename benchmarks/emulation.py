"""Stages that only sleep, so that many ranks run truly side by side on a machine with a few cores.

The F, B and W of a stage take the time they are told, and write down when they ran. What was written down is what a
runner really did, whoever's it is: its plan, and the times to play that plan with.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe.plan import Action, Costs, Event, Plan, Span, plan_of, play
from megapipe.weight_grad import defer

from .launching import gather
from .runners import FedStage, Runner

HIDDEN = 1024


class Call(NamedTuple):
    """A piece of a stage's work: F, B, W or both of these."""

    kind: str
    stage: int
    start: float
    end: float


@dataclass
class Emulation:
    """What the stages of one rank take, and what they did in the step under way.

    Attributes:
        seconds: of a kind of work on a stage, asked anew for each microbatch.
        num_rows: a message between stages is [num_rows, 1, HIDDEN] in float32.
        num_pieces: a deferred W comes in so many, each as long as `seconds` says.
    """

    seconds: Callable[[str, int], float]
    num_rows: int = 16
    num_pieces: int = 1
    calls: list[Call] = field(default_factory=list)

    @contextmanager
    def during(self, kind: str, stage: int) -> Iterator[None]:
        start = time.perf_counter()
        seconds = sum(self.seconds(letter, stage) for letter in kind)
        if seconds:
            time.sleep(seconds)
        yield
        self.calls.append(Call(kind, stage, start, time.perf_counter()))

    def example(self) -> Tensor:
        return torch.zeros(self.num_rows, 1, HIDDEN)


class Whole(torch.autograd.Function):
    """Forward, and a backward that is not split."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, emulation: Emulation, stage: int) -> Tensor:
        ctx.emulation, ctx.stage, ctx.weight = emulation, stage, weight
        with emulation.during("F", stage):
            return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.emulation.during("B", ctx.stage):
            inputs = grad.clone()
        with ctx.emulation.during("W", ctx.stage):
            return inputs, torch.zeros_like(ctx.weight), None, None


class Deferring(Whole):
    """The same for megapipe: W is deferred."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.emulation.during("B", ctx.stage):
            inputs = grad.clone()
        for _ in range(ctx.emulation.num_pieces):
            defer(ctx.weight, functools.partial(_weight_gradient, ctx.emulation, ctx.stage, ctx.weight))
        return inputs, None, None, None


def _weight_gradient(emulation: Emulation, stage: int, weight: Tensor) -> Tensor:
    with emulation.during("W", stage):
        return torch.zeros_like(weight)


class Storing(Whole):
    """The same for DualPipe, which says for each backward whether it is split."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        from dualpipe.utils import WeightGradStore

        with ctx.emulation.during("B" if WeightGradStore.enabled else "BW", ctx.stage):
            inputs = grad.clone()
        if WeightGradStore.enabled:
            WeightGradStore.put(functools.partial(_weight_gradient, ctx.emulation, ctx.stage, ctx.weight))
        return inputs, torch.zeros_like(ctx.weight), None, None


class _Inputs(Whole):
    """For a runtime that walks the graph to split it: F and B."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.emulation.during("B", ctx.stage):
            return grad.clone(), None, None, None


class _Weight(torch.autograd.Function):
    """W, reached only from the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, emulation: Emulation, stage: int) -> Tensor:
        ctx.emulation, ctx.stage = emulation, stage
        return weight.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.emulation.during("W", ctx.stage):
            return grad, None, None


class _Join(torch.autograd.Function):
    """Both again. It runs in B and once more in W, and costs nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight.detach()
        ctx.mark_dirty(x)  # neither a copy nor a view, which cannot be sent
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, ctx.weight


def splitting(x: Tensor, weight: Tensor, emulation: Emulation, stage: int) -> Tensor:
    inputs = _Inputs.apply(x, weight.detach(), emulation, stage)
    joined: Tensor = _Join.apply(inputs, _Weight.apply(weight, emulation, stage))
    return joined


class Stage(FedStage):
    """One stage."""

    def __init__(
        self, index: int, work: Callable[[Tensor, Tensor, Emulation, int], Tensor], emulation: Emulation, config: Any
    ) -> None:
        super().__init__(config, emulation.example().requires_grad_() if index == 0 else None)
        self.weight = nn.Parameter(torch.zeros(1))
        self._index, self._work, self._emulation = index, work, emulation

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self._work(self.fed(x), self.weight, self._emulation, self._index)


class Floor(NamedTuple):
    """What torch itself takes around the work of an emulated F and of a B, in seconds: modules, Functions, autograd.

    Not little: a core that has slept is cold.
    """

    forward: float
    backward: float


def measure_floor(module: Stage, emulation: Emulation, repeats: int = 12) -> Floor:
    """Forward and backward of a stage called by hand."""
    example = emulation.example()
    forward, backward = [], []
    for _ in range(repeats):
        emulation.calls.clear()
        x = example.clone().requires_grad_()
        begin = time.perf_counter()
        output = module(x)
        middle = time.perf_counter()
        output.backward(example)
        end = time.perf_counter()
        first, *others = [call.end - call.start for call in emulation.calls]
        forward.append(middle - begin - first)
        backward.append(end - middle - sum(others))
    return Floor(median(forward), median(backward))


@dataclass(frozen=True)
class TwoWayPlan(Plan):
    """DualPipe's: two pipelines on the same ranks, one up and one down. As a V it is cut at its turn."""

    def needs(self, event: Event) -> Event | None:
        needed = super().needs(event)
        top = self.pp_size - 1
        turn = {("send_forward", top), ("send_backward", top + 1)}
        return None if needed is None or (needed.verb, needed.stage) in turn else needed


@dataclass
class Step:
    """One step as it was: per rank the calls; and the time from the first rank's begin to the last one's end."""

    calls: list[list[Call]]
    duration: float
    runner: Runner

    def _actions(self) -> tuple[list[list[Action]], dict[Action, float]]:
        """What each rank did, in order, and how long each took. A backward that was not split counts as one."""
        rows, durations = [], {}
        num_slices, splits = self.runner.num_slices, self.runner.splits
        for calls in self.calls:
            counts: Counter[tuple[str, int]] = Counter()
            row: list[Action] = []
            for kind, stage, start, end in calls:
                microbatch, part = divmod(counts[kind[0], stage], num_slices)
                action = Action(stage, kind, microbatch, part if kind == "F" else num_slices - 1 - part)
                counts[kind[0], stage] += 1
                if kind == "W" and not splits:
                    durations[action._replace(kind="BW")] += end - start
                    continue
                if kind == "B" and not splits:
                    action = action._replace(kind="BW")
                row.append(action)
                durations[action] = end - start
            rows.append(row)
        return rows, durations

    def plan(self, name: str) -> Plan:
        plan = plan_of(name, self._actions()[0])
        return TwoWayPlan(**vars(plan)) if self.runner.is_two_way else plan

    def played(self, floor: Floor | None = None) -> float:
        """How long the step takes when each F, B and W takes what it took, with the floor around it where that is
        given, and everything else takes nothing."""
        rows, durations = self._actions()
        if floor is not None:
            extra = {"F": floor.forward, "B": floor.backward, "BW": floor.backward, "W": 0.0}
            durations = {action: time + extra[action.kind] for action, time in durations.items()}
        plan = self.plan("")
        clocks = [0.0] * plan.pp_size
        spans: list[list[Span]] = [[] for _ in rows]
        play(plan, durations.__getitem__, Costs(), clocks, spans)
        return max(clocks)


def gather_steps(own: Sequence[tuple[float, float, list[Call]]], runner: Runner) -> list[Step]:
    """Per step of this rank (begin, end, calls), those of all ranks together. Every rank calls it."""
    of_ranks = (zip(*ranks) for ranks in zip(*gather(list(own))))
    return [Step(list(calls), max(ends) - min(begins), runner) for begins, ends, calls in of_ranks]
