"""Ws placed by what was measured, against the schedule's own places.

    python -m benchmarks.tuned --pp 4 --schedules zbv

A few steps are recorded, their timeline places the Ws, and the schedule and this plan run in turns, with the same
random draws for both.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from megapipe import get_forward_backward_func
from megapipe.analysis import TimelineRecorder
from megapipe.plan import Costs, make_plan, place_weights, simulate

from .options import run
from .rounds import Emulated, take_turns
from .tables import Table, median_and_spread

RATIOS = {"1 : 1.4 : 0.6": (1.0, 1.4, 0.6), "1 : 1.2 : 0.8": (1.0, 1.2, 0.8)}
WARMUP = 8
"""Steps before anything counts. The last of them are recorded."""

HEADER = (
    "schedule | F : B : W | stages | static, ms | tuned, ms | "
    "tuned / static | by the plan | static / bound | tuned / bound"
)
NOTES = """Medians of interleaved steps, in brackets the middle half. *by the plan*: what the search promises for these
costs without any noise. *bound*: what no order can beat, whatever its memory. *uneven*: one stage takes 1.5 times as
long, the last one 1.3 times. Every time is drawn anew within 10 % of its mean, alike for both."""


class Case(NamedTuple):
    schedule: str
    ratio: str
    stages: str


def stage_costs(case: Case, pp_size: int, num_chunks: int, milliseconds: float) -> Costs:
    num_stages = pp_size * num_chunks
    scale = [1.0] * num_stages
    if case.stages == "uneven":
        scale[num_stages // 3], scale[-1] = 1.5, 1.3
    parts = ([milliseconds * share / num_chunks * one for one in scale] for share in RATIOS[case.ratio])
    return Costs(*parts)


def seconds_with_jitter(costs: Costs, jitter: float, seed: str) -> Callable[[str, int], float]:
    """The draws depend on nothing but how often each kind was asked for: with other places for the Ws every action
    still takes what it takes."""
    parts: dict[str, Any] = {"F": costs.forward, "B": costs.backward_input, "W": costs.backward_weight}
    draws: dict[tuple[str, int], random.Random] = {}

    def seconds(kind: str, stage: int) -> float:
        draw = draws.setdefault((kind, stage), random.Random(f"{seed} {kind} {stage}"))
        return float(parts[kind][stage]) / 1000 * (1 + jitter * draw.uniform(-1, 1))

    return seconds


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    cases = itertools.starmap(Case, itertools.product(args.schedules.split(","), RATIOS, ("equal", "uneven")))
    rows = [compare(args, case) for case in cases]
    title = f"Ws placed by measured times, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms"
    return [(f"tuned-pp{args.pp}", title, HEADER, rows, NOTES)]


def compare(args: argparse.Namespace, case: Case) -> list[str]:
    plan = make_plan(case.schedule, args.pp, args.microbatches)
    costs = stage_costs(case, args.pp, plan.num_chunks, args.milliseconds)
    seconds = [seconds_with_jitter(costs, args.jitter, str(case)) for _ in range(2)]
    recorder = TimelineRecorder(WARMUP - 2)
    name = f"megapipe {case.schedule}"
    own = Emulated(name, args.microbatches, seconds[0], record_timeline=recorder)
    for _ in range(WARMUP):
        own.step()
    placed = Emulated(name, args.microbatches, seconds[1])
    placed.runner.function = get_forward_backward_func(recorder.gather().tuned_plan())
    own = Emulated(name, args.microbatches, seconds_with_jitter(costs, args.jitter, str(case)))
    turns = take_turns([own, placed], args.rounds, WARMUP, block=1)
    static, tuned = ([1000 * step.duration for step in steps] for steps in turns)
    simulation = simulate(plan, costs)
    bound = simulation.lower_bound
    return [
        case.schedule,
        case.ratio,
        case.stages,
        median_and_spread(static, "{:.0f}"),
        median_and_spread(tuned, "{:.0f}"),
        f"{median(tuned) / median(static):.3f}",
        f"{simulate(place_weights(plan, costs), costs).makespan / simulation.makespan:.3f}",
        f"{median(static) / bound:.3f}",
        f"{median(tuned) / bound:.3f}",
    ]


if __name__ == "__main__":
    schedules = "zbv,zb1p,interleaved_zb1p"
    run(measure, pp=4, microbatches=8, milliseconds=20.0, jitter=0.1, rounds=12, schedules=schedules)
