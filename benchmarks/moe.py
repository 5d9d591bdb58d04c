"""A mixture of experts on emulated compute: what pairs and pending Ws hide of its all-to-alls.

    python -m benchmarks.moe --pp 4 --microbatches 16
    python -m benchmarks.moe --pp 4 --microbatches 16 --exchange-milliseconds 1.25
    python -m benchmarks.moe --pp 1 --microbatches 16

A layer sleeps for its attention and for its experts, half of its F, B and W in each. Its W comes in six or four pieces,
as the W of a transformer's layer comes in products of matrices. It exchanges tokens before and after its experts,
forward and backward alike: by a real all-to-all between two replicas that ends no sooner than a given time after it was
started.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Generator
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megapipe import parallel_state
from megapipe.overlap import in_segments, run_segments, start_all_to_all
from megapipe.plan import Settings, Simulation, make_plan

from .delays import delayed_collectives
from .emulation import Deferring, Emulation
from .options import run
from .rounds import Emulated, take_turns
from .runners import FedStage
from .tables import Table, median_and_spread

NUM_REPLICAS = 2
HEADER = (
    "schedule | in flight | step, ms | over without | "
    "over without, by the plan | step / ideal | by the plan, ms | over the plan"
)


class Kind(NamedTuple):
    """A schedule and how it overlaps.

    Attributes:
        num_chunks: stages per rank.
        num_pending: `min_pending_weights`.
        num_pieces: of a layer's W.
    """

    schedule: str
    num_chunks: int
    overlap: bool
    num_pending: int = 0
    num_pieces: int = 6

    def __str__(self) -> str:
        chunks = f" x{self.num_chunks}" if self.schedule[0] in "ic" else ""
        pending = f", {self.num_pending} more W pending" if self.num_pending else ""
        pieces = f", W in {self.num_pieces} pieces" if self.num_pieces != 6 else ""
        return self.schedule + chunks + (", overlap" if self.overlap else "") + pending + pieces

    def without(self, pp_size: int) -> Kind:
        """What hides nothing, in the same placement."""
        plain = {"combined_1f1b": "interleaved_1f1b", "combined_zb1p": "interleaved_zb1p"}
        name = plain.get(self.schedule, self.schedule)
        if pp_size == 1:
            name = "no_pipelining"
        return Kind(name, self.num_chunks, False)


KINDS = [
    Kind("1f1b", 1, False),
    Kind("dualpipev", 2, False),
    Kind("dualpipev", 2, True),
    Kind("zbv", 2, False),
    Kind("zbv", 2, True, 1),
    Kind("zbv", 2, True, 1, num_pieces=4),
    Kind("interleaved_1f1b", 2, False),
    Kind("combined_1f1b", 2, True),
    Kind("interleaved_1f1b", 4, False),
    Kind("combined_1f1b", 4, True),
    Kind("interleaved_zb1p", 4, False),
    Kind("interleaved_zb1p", 4, True, 1),
    Kind("combined_zb1p", 4, True, 1),
]
ALONE = [Kind("no_pipelining", 1, False), Kind("combined_1f1b", 1, True), Kind("combined_zb1p", 1, True, 1)]
"""On one rank."""


# The milliseconds are those of each of F, B and W of a layer's microbatch, and of a dispatch or a combine.
DEFAULTS: dict[str, Any] = {"pp": 4, "microbatches": 16, "milliseconds": 10.0, "exchange_milliseconds": 3.0}
DEFAULTS |= {"layers": 4, "only": list(dict.fromkeys(kind.schedule for kind in KINDS + ALONE))}
DEFAULTS |= {"rounds": 4, "block": 2, "warmup": 1}


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    parallel_state.initialize_model_parallel(args.pp, expert_model_parallel_size=NUM_REPLICAS)
    kinds = KINDS if args.pp > 1 else ALONE
    kinds = [kind for kind in kinds if kind.schedule in args.only]
    kinds = [kind for kind in kinds if args.layers % kind.num_chunks == 0]
    emulated = [EmulatedExperts(kind, args) for kind in kinds]
    with delayed_collectives(args.exchange_milliseconds / 1000):
        all_steps = take_turns(emulated, args.rounds, args.warmup, args.block)
    medians = {kind: median(1000 * step.duration for step in steps) for kind, steps in zip(kinds, all_steps)}
    rows = [
        row(args, kind, [1000 * step.duration for step in steps], medians.get(kind.without(args.pp)))
        for kind, steps in zip(kinds, all_steps)
    ]
    compute, exchange = args.milliseconds, args.exchange_milliseconds
    share = round(100 * 2 * exchange / (compute + 2 * exchange))
    title = f"Emulated mixture of experts, pp={args.pp}, ep={NUM_REPLICAS}, m={args.microbatches}"
    notes = (
        f"A rank has {args.layers} layers. Per microbatch a layer computes for {3 * compute:g} ms ({compute:g} each in "
        f"F, B and W) and exchanges for {4 * exchange:g} ms ({exchange:g} each in dispatch and combine, in F and again "
        f"in B), {share}% of an F. Medians of interleaved steps, in brackets the middle half. "
        "The W of a layer comes in 6 pieces, where no row says 4. *in flight*: microbatches. *ideal*: all of the "
        "compute, and no communication. *over without*: interleaved_1f1b and interleaved_zb1p for the combined ones; "
        "on one rank no_pipelining. *by the plan*: with these times and nothing else, where Ws can be cut anywhere."
    )
    return [(f"moe-pp{args.pp}-m{args.microbatches}-{share}percent", title, HEADER, rows, notes)]


def row(args: argparse.Namespace, kind: Kind, times: list[float], without: float | None) -> list[str]:
    """`without`: the step of `kind.without`."""
    ideal = 3 * args.layers * args.microbatches * args.milliseconds
    simulation = planned(args, kind)
    floor = simulation.makespan / planned(args, kind.without(args.pp)).makespan
    return [
        str(kind),
        f"{max(simulation.peak_activations):g}",
        median_and_spread(times, "{:.0f}"),
        "-" if without is None or not kind.overlap else f"{median(times) / without:.3f}",
        f"{floor:.3f}" if kind.overlap else "-",
        f"{median(times) / ideal:.3f}",
        f"{simulation.makespan:.0f}",
        f"{median(times) / simulation.makespan:.3f}",
    ]


def planned(args: argparse.Namespace, kind: Kind) -> Simulation:
    settings = Settings(min_pending_weights=kind.num_pending)
    plan = make_plan(kind.schedule, args.pp, args.microbatches, kind.num_chunks, settings=settings)
    compute, exchange = args.layers * args.milliseconds, 2 * args.layers * args.exchange_milliseconds
    times = (compute + exchange, compute + exchange, compute)
    return plan.simulate(*times, exchange=exchange if kind.overlap else 0.0)


class EmulatedExperts(Emulated):
    """A schedule with emulated layers."""

    def __init__(self, kind: Kind, args: argparse.Namespace) -> None:
        self._stage = OverlappedStage if kind.overlap else Stage
        self._num_layers = args.layers * args.pp
        half = args.milliseconds / 1000 / 2
        pieces = kind.num_pieces // 2
        of_kind = {"F": half, "B": half, "W": half / pieces}
        super().__init__(
            f"megapipe {kind.schedule}",
            args.microbatches,
            lambda letter, stage: of_kind[letter],
            2 * NUM_REPLICAS * 4096,
            num_chunks=kind.num_chunks,
            min_pending_weights=kind.num_pending,
            weights_per_window=int(kind.overlap),
        )
        self.emulation.num_pieces = pieces

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


class Stage(FedStage):
    """Layers, one after the other. It does not tell where it waits."""

    def __init__(self, index: int, num_layers: int, emulation: Emulation, config: Any) -> None:
        super().__init__(config, emulation.example().requires_grad_() if index == 0 else None)
        self.layers = nn.ModuleList(Layer(index, emulation) for _ in range(num_layers))

    def _segments(self) -> Generator[None, None, Tensor]:
        x = self.fed()
        for layer in self.layers:
            x = yield from in_segments(layer, x)
        return x

    def forward(self) -> Tensor:
        return run_segments(self._segments())


class OverlappedStage(Stage):
    """It does."""

    def forward_segments(self) -> Generator[None, None, Tensor]:
        return self._segments()


if __name__ == "__main__":
    run(measure, lambda args: args.pp * NUM_REPLICAS, **DEFAULTS)
