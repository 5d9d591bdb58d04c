"""A mixture of experts on emulated compute: what overlapped pairs hide of its all-to-alls.

    python -m benchmarks.moe --pp 4 --microbatches 16

A layer sleeps for its attention and for its experts, half of its F, B and W in each, and exchanges tokens before and
after its experts, forward and backward alike: by a real all-to-all between two replicas that ends no sooner than a
given time after it was started.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe import parallel_state
from megapipe.overlap import in_segments, run_segments, start_all_to_all
from megapipe.plan import make_plan

from .emulation import Deferring, Emulation
from .launching import launch
from .rounds import Emulated, take_turns
from .tables import FOLDER, median_and_spread, save_table

NUM_REPLICAS = 2
NUM_CHUNKS = 2  # of a rank, where it has several; so many layers it has in any case
SCHEDULES = ["zbv", "1f1b", "interleaved_1f1b", "zb1p"]
HEADER = ["schedule", "step, ms", "over dualpipev without overlap", "step / ideal", "by the plan, ms"]


def main() -> None:
    args = parse()
    rows = launch(args.pp * NUM_REPLICAS, measure, args)
    compute, exchange = args.milliseconds, args.exchange_milliseconds
    title = f"Emulated mixture of experts, pp={args.pp}, ep={NUM_REPLICAS}, m={args.microbatches}"
    notes = (
        f"A rank has {NUM_CHUNKS} layers. Per microbatch a layer computes for {3 * compute:g} ms ({compute:g} each in "
        f"F, B and W) and exchanges for {4 * exchange:g} ms ({exchange:g} each in dispatch and combine, in F and again "
        f"in B), {4 * exchange / 3 / compute:.0%} of that. Medians of interleaved steps, in brackets the middle half. "
        "*ideal*: all of the compute, and no communication. *by the plan*: with these times and nothing else, where "
        "an overlapped pair hides all of its exchanges."
    )
    save_table(f"moe-pp{args.pp}", title, HEADER, rows, notes, args.folder)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--milliseconds", type=float, default=10.0, help="of each of F, B, W, of a layer's microbatch")
    parser.add_argument("--exchange-milliseconds", type=float, default=3.0, help="of a dispatch, and of a combine")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, help="only dualpipev, with or without")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--block", type=int, default=2, help="steps that a schedule does in its turn")
    parser.add_argument("--warmup", type=int, default=2, help="steps of each that do not count")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args(arguments)


def measure(rank: int, args: argparse.Namespace) -> list[list[str]]:
    parallel_state.initialize_model_parallel(args.pp, expert_model_parallel_size=NUM_REPLICAS)
    if args.overlap is None:
        kinds = [("dualpipev", True), ("dualpipev", False), *((schedule, False) for schedule in SCHEDULES)]
    else:
        kinds = [("dualpipev", args.overlap)]
    emulated = [EmulatedExperts(schedule, overlap, args) for schedule, overlap in kinds]
    with delayed_all_to_alls(args.exchange_milliseconds / 1000):
        all_steps = take_turns(emulated, args.rounds, args.warmup, args.block)
    times = [[1000 * step.duration for step in steps] for steps in all_steps]
    base = median(times[kinds.index(("dualpipev", False))]) if ("dualpipev", False) in kinds else None
    return [row(args, *kind, time, base) for kind, time in zip(kinds, times)]


def row(args: argparse.Namespace, schedule: str, overlap: bool, times: list[float], base: float | None) -> list[str]:
    """`base`: the step of dualpipev without overlap."""
    ideal = 3 * NUM_CHUNKS * args.microbatches * args.milliseconds
    return [
        schedule + {True: ", overlap", False: ", no overlap"}[overlap] * (schedule == "dualpipev"),
        median_and_spread(times, "{:.0f}"),
        "-" if base is None else f"{median(times) / base:.3f}",
        f"{median(times) / ideal:.3f}",
        f"{planned(args, schedule, overlap):.0f}",
    ]


def planned(args: argparse.Namespace, schedule: str, overlap: bool) -> float:
    chunks = NUM_CHUNKS if schedule == "interleaved_1f1b" else None
    plan = make_plan(schedule, args.pp, args.microbatches, chunks)
    compute, exchange = NUM_CHUNKS * args.milliseconds, 2 * NUM_CHUNKS * args.exchange_milliseconds
    times = (compute + exchange, compute + exchange, compute)
    return plan.simulate(*times, exchange=exchange if overlap else 0.0).makespan


@contextmanager
def delayed_all_to_alls(seconds: float) -> Iterator[None]:
    """Meanwhile, an all-to-all of this process ends no sooner than so long after its start."""
    original = dist.all_to_all_single

    def delayed(*args: Any, **kwargs: Any) -> Delayed:
        end = time.perf_counter() + seconds
        return Delayed(original(*args, **kwargs), end)

    dist.all_to_all_single = delayed
    try:
        yield
    finally:
        dist.all_to_all_single = original


class Delayed:
    """What is under way, for those who wait for it."""

    def __init__(self, work: dist.Work, end: float) -> None:
        self._work, self._end = work, end

    def wait(self) -> None:
        self._work.wait()
        with suppress(ValueError):  # it is later than that
            time.sleep(self._end - time.perf_counter())


class EmulatedExperts(Emulated):
    """A schedule with emulated layers."""

    def __init__(self, schedule: str, overlap: bool, args: argparse.Namespace) -> None:
        self._stage = OverlappedStage if overlap else Stage
        self._num_layers = NUM_CHUNKS * args.pp
        half = args.milliseconds / 1000 / 2
        super().__init__(f"megapipe {schedule}", args.microbatches, lambda kind, stage: half, 2 * NUM_REPLICAS)

    def _make_stage(self, index: int, num_stages: int, how: str, config: Any) -> nn.Module:
        return self._stage(index, self._num_layers // num_stages, self.emulation, config)


class Sleeper(nn.Module):
    """Half of a layer."""

    def __init__(self, index: int, emulation: Emulation) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._index, self._emulation = index, emulation

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = Deferring.apply(x, self.weight, self._emulation, self._index)
        return y


class Layer(nn.Module):
    """Attention, then experts between two exchanges, each rank with as much to send to the other as to itself."""

    def __init__(self, index: int, emulation: Emulation) -> None:
        super().__init__()
        self.attention, self.experts = Sleeper(index, emulation), Sleeper(index, emulation)
        self._exchange = functools.partial(
            start_all_to_all,
            output_splits=[2] * NUM_REPLICAS,
            input_splits=[2] * NUM_REPLICAS,
            group=parallel_state.get_expert_model_parallel_group(),
        )

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        dispatched = self._exchange(self.attention(x))
        yield
        combined = self._exchange(self.experts(dispatched.wait()))
        yield
        return combined.wait()

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


class Stage(nn.Module):
    """Layers, one after the other. It does not tell where it waits."""

    def __init__(self, index: int, num_layers: int, emulation: Emulation, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(index, emulation) for _ in range(num_layers))
        self.config = config
        self._example = emulation.example().requires_grad_() if index == 0 else None
        self._input: Tensor | None = None

    def set_input_tensor(self, inputs: Any) -> None:
        self._input = inputs[0] if isinstance(inputs, list) else inputs

    def _segments(self) -> Generator[None, None, Tensor]:
        x = self._input if self._example is None else self._example
        for layer in self.layers:
            x = yield from in_segments(layer, x)
        assert x is not None
        return x

    def forward(self) -> Tensor:
        return run_segments(self._segments())


class OverlappedStage(Stage):
    """It does."""

    def forward_segments(self) -> Generator[None, None, Tensor]:
        return self._segments()


if __name__ == "__main__":
    main()
