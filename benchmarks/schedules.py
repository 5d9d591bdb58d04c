"""Schedules on emulated compute: what a step takes against the ideal, and against the schedule's plan.

    python -m benchmarks.schedules --pp 4 --microbatches 8 --message-bytes 65536

A rank sleeps for 20 ms in the F, B and W of each microbatch, shared out over its chunks and slices; messages are real.
"""

from __future__ import annotations

import argparse
import functools
from statistics import median
from typing import Any

from .options import run
from .rounds import Emulated, take_turns
from .runners import ALL, is_there
from .tables import Table, median_and_spread

HEADER = (
    "library and schedule | step / ideal | step / plan | with measured stages | "
    "with measured calls | plan / ideal | in flight"
)
NOTES = """Medians of interleaved steps, in brackets the middle half. *ideal*: m (F + B + W). *plan*: the order in which
the library ran F, B and W, simulated with their nominal times. *with measured stages*: step / plan, where the plan has
the times that F, B and W took. *with measured calls*: where it also has the time of torch's calls around them, measured
without a pipeline (the core is cold after each sleep). The rest is messages and the library itself. *in flight*:
microbatches of a whole rank, from F to W."""


# The milliseconds are those of each of F, B and W of a rank's microbatch; a block is the steps of a runner's turn.
DEFAULTS = {"pp": 4, "microbatches": 8, "milliseconds": 20.0, "message_bytes": 64 * 1024, "rounds": 5, "block": 2}


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    seconds = args.milliseconds / 1000
    names = filter(is_there, args.runners.split(","))
    emulated = [Emulated(name, args.microbatches, seconds, args.message_bytes) for name in names]
    for one in emulated:
        one.measure_floor()
    all_steps = take_turns(emulated, args.rounds, 1, args.block)
    rows = [row(one, steps, args.microbatches, seconds) for one, steps in zip(emulated, all_steps)]
    size = args.message_bytes // 1024
    title = f"Emulated compute, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms, messages of {size} KB"
    return [(f"schedules-pp{args.pp}-m{args.microbatches}-{size}k", title, HEADER, rows, NOTES)]


def row(one: Emulated, steps: list[Any], num_microbatches: int, seconds: float) -> list[str]:
    ideal = 3 * num_microbatches * seconds
    plan = steps[0].plan(one.runner.name)
    time = [seconds / one.runner.num_chunks] * plan.pp_size * plan.num_chunks
    simulation = plan.simulate(time, time, time)
    in_flight = max(simulation.peak_activations) * plan.num_chunks / one.runner.num_chunks
    over = functools.partial(_over, steps)
    with_stages = [step.duration / step.played() for step in steps]
    with_calls = [step.duration / step.played(one.floor) for step in steps]
    return [
        one.runner.name,
        median_and_spread(over(ideal)),
        f"{median(over(simulation.makespan)):.3f}",
        median_and_spread(with_stages),
        median_and_spread(with_calls),
        f"{simulation.makespan / ideal:.3f}",
        f"{in_flight:g}",
    ]


def _over(steps: list[Any], time: float) -> list[float]:
    return [step.duration / time for step in steps]


if __name__ == "__main__":
    run(measure, **DEFAULTS, runners=",".join(ALL))
