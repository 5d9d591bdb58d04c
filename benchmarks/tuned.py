"""Ws placed by what was measured, against the schedule's own places.

    python -m benchmarks.tuned --pp 4 --schedules zbv

Every case is run both ways in turns, with the same random draws for both. A last run changes a stage's cost in the
middle and shows when the tuner takes note, and what the step takes longer in which it searches.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from megapipe.plan import Costs, Settings, make_plan, simulate
from megapipe.runtime.session import _sessions
from megapipe.runtime.weight_tuning import INTERVAL, WeightTuner, choose

from .emulation import Step
from .launching import launch
from .rounds import Emulated, take_turns
from .tables import FOLDER, median_and_spread, save_table

RATIOS = {"1 : 1.4 : 0.6": (1.0, 1.4, 0.6), "1 : 1.2 : 0.8": (1.0, 1.2, 0.8)}
WARMUP = 8
"""Steps before anything counts: the tuner decides before the sixth."""

HEADER = [
    "schedule",
    "F : B : W",
    "stages",
    "static, ms",
    "tuned, ms",
    "tuned / static",
    "by the plan",
    "static / bound",
    "tuned / bound",
]
NOTES = """Medians of interleaved steps, in brackets the middle half. *by the plan*: what the search promises for these
costs without any noise. *bound*: what no order can beat, whatever its memory. *uneven*: one stage takes 1.5 times as
long, the last one 1.3 times. Every time is drawn anew within 10 % of its mean, alike for both."""


class Case(NamedTuple):
    schedule: str
    ratio: str
    stages: str


def main() -> None:
    args = parse()
    cases = [
        Case(schedule, ratio, stages)
        for schedule in args.schedules.split(",")
        for ratio in RATIOS
        for stages in ("equal", "uneven")
    ]
    rows = launch(args.pp, measure, args, cases)
    title = f"Tuned places of Ws, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms"
    save_table(f"tuned-pp{args.pp}", title, HEADER, rows, NOTES, args.folder)
    if args.change:
        header = ["steps", "what", "median step, ms", "longest, ms"]
        title = f"A stage becomes 1.5 times as slow at step 30, zbv, pp={args.pp}, m={args.microbatches}"
        notes = f"Times are exchanged every {INTERVAL} steps and decided on two steps later."
        rows = launch(args.pp, change, args)
        save_table(f"tuned-change-pp{args.pp}", title, header, rows, notes, args.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--jitter", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--schedules", default="zbv,zb1p,interleaved_zb1p")
    parser.add_argument("--change", action="store_true", help="also the run in which a cost changes")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args()


# Costs


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


# Steps


def measure(rank: int, args: argparse.Namespace, cases: list[Case]) -> list[list[str]]:
    return [compare(args, case) for case in cases]


def compare(args: argparse.Namespace, case: Case) -> list[str]:
    num_chunks = make_plan(case.schedule, args.pp, args.microbatches).num_chunks
    costs = stage_costs(case, args.pp, num_chunks, args.milliseconds)
    forget_tuners()
    both = [
        Emulated(
            f"megapipe {case.schedule}",
            args.microbatches,
            seconds_with_jitter(costs, args.jitter, str(case)),
            16,
            weight_grad_placement=placement,
        )
        for placement in ("static", "tuned")
    ]
    static, tuned = (_milliseconds(steps) for steps in take_turns(both, args.rounds, WARMUP, block=2))
    plan = make_plan(case.schedule, args.pp, args.microbatches)
    settings = Settings()
    chunks = (args.pp, args.microbatches, num_chunks)
    choice = choose(_schedule(case.schedule), *chunks, settings, costs)
    bound = simulate(plan, costs).lower_bound
    return [
        case.schedule,
        case.ratio,
        case.stages,
        median_and_spread(static, "{:.0f}"),
        median_and_spread(tuned, "{:.0f}"),
        f"{median(tuned) / median(static):.3f}",
        f"{choice.makespan / choice.own_makespan:.3f}",
        f"{median(static) / bound:.3f}",
        f"{median(tuned) / bound:.3f}",
    ]


def change(rank: int, args: argparse.Namespace) -> list[list[str]]:
    """60 steps, of which a stage is slower in the second half."""
    case = Case("zbv", "1 : 1.4 : 0.6", "equal")
    costs = stage_costs(case, args.pp, 2, args.milliseconds)
    drawn = seconds_with_jitter(costs, args.jitter, "change")
    forget_tuners()
    is_late = False

    def seconds(kind: str, stage: int) -> float:
        return drawn(kind, stage) * (1.5 if is_late and stage == 2 * args.pp // 3 else 1.0)

    one = Emulated("megapipe zbv", args.microbatches, seconds, 16, weight_grad_placement="tuned")
    chosen: list[str] = []
    for number in range(1, 61):
        is_late = number >= 30
        one.step()
        chosen.append(str(tuner_in_use()))
    times = [end - begin for begin, end, _ in one.steps]
    changes = [k for k in range(1, 60) if chosen[k] != chosen[k - 1]]
    rows = []
    for begin, end in zip([0, *sorted({*changes, 29})], [*sorted({*changes, 29}), 60]):
        what = "slower" if begin >= 29 else "equal"
        what += ", the schedule's places" if chosen[begin] == "the schedule's" else f", places {chosen[begin]}"
        span = [1000 * time for time in times[begin:end]]
        longest = f"{max(span):.0f} (step {begin + span.index(max(span)) + 1})"
        rows.append([f"{begin + 1}-{end}", what, f"{median(span):.0f}", longest])
    return rows


def tuner_in_use() -> WeightTuner:
    (session,) = _sessions.values()
    (tuner,) = session._tuners.values()
    return tuner


def forget_tuners() -> None:
    """Each case begins without knowing anything: a session keeps a tuner for each kind of step."""
    for session in _sessions.values():
        session._tuners.clear()


def _schedule(name: str) -> Any:
    from megapipe.plan import find_schedule

    return find_schedule(name)


def _milliseconds(steps: list[Step]) -> list[float]:
    return [1000 * step.duration for step in steps]


if __name__ == "__main__":
    main()
