"""What a step takes longer for each millisecond that messages take longer: by the plans, and measured.

    python -m benchmarks.latency --pp 4 --milliseconds 20

Microbatches in flight beyond 1F1B's are the remedy: `max_in_flight`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.config import PipelineConfig
from megapipe.plan import Plan, make_plan

from .launching import launch
from .rounds import Emulated, take_turns
from .tables import FOLDER, save_table

SCHEDULES = [
    ("1f1b", 1.0),
    ("1f1b", 1.5),
    ("1f1b", 2.0),
    ("interleaved_1f1b", None),
    ("zb1p", 1.0),
    ("zb1p", 1.5),
    ("zb2p", None),
    ("interleaved_zb1p", None),
    ("zbv", None),
    ("v_half", None),
    ("v_min", None),
    ("gpipe", None),
]
"""With how many microbatches in flight, in multiples of the number of ranks; None for the schedule's own."""


def main() -> None:
    args = parse()
    slopes = launch(args.pp, measure, args) if args.rounds else [None] * len(SCHEDULES)
    rows = [row(args, name, share, slope) for (name, share), slope in zip(SCHEDULES, slopes)]
    header = [
        "schedule",
        f"plan, pp={args.pp}, m={args.microbatches}",
        "measured",
        "plan, pp=8, m=32",
        "step at 0 latency, pp=8, m=32",
    ]
    title = f"Milliseconds of step time per millisecond of latency (from {args.latency:g} to {2 * args.latency:g} ms)"
    notes = f"F, B and W of {args.milliseconds:g} ms. Steps at 0 latency are over the ideal."
    save_table("latency", title, header, rows, notes, args.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--milliseconds", type=float, default=20.0)
    parser.add_argument("--latency", type=float, default=3.0, help="milliseconds, once and twice")
    parser.add_argument("--rounds", type=int, default=3, help="0: only simulate")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args()


def measure(rank: int, args: argparse.Namespace) -> list[float]:
    """The slope of each schedule."""
    emulated = [_emulated(args, *one, latency) for one in SCHEDULES for latency in (args.latency, 2 * args.latency)]
    times = [1000 * median(step.duration for step in steps) for steps in take_turns(emulated, args.rounds, 2)]
    return [(late - early) / args.latency for early, late in zip(times[::2], times[1::2])]


def _emulated(args: argparse.Namespace, schedule: str, share: float | None, latency: float) -> Emulated:
    one: Any = None

    def seconds(kind: str, stage: int) -> float:
        return float(args.milliseconds / 1000 / one.runner.num_chunks)

    limit = None if share is None else share * args.pp
    one = Emulated(f"megapipe {schedule}", args.microbatches, seconds, 16, max_in_flight=limit)
    one.emulation.latency = latency / 1000
    return one


def row(args: argparse.Namespace, schedule: str, share: float | None, measured: float | None) -> list[str]:
    small = slope(plan(schedule, share, args.pp, args.microbatches), args.milliseconds, args.latency)
    large_plan = plan(schedule, share, 8, 32)
    time = args.milliseconds
    return [
        schedule if share is None else f"{schedule}, {share:g} p in flight",
        f"{small:.1f}",
        "-" if measured is None else f"{measured:.1f}",
        f"{slope(large_plan, time, args.latency):.1f}",
        f"{large_plan.simulate(time, time, time).makespan / (3 * 32 * time):.3f}",
    ]


def plan(schedule: str, share: float | None, pp_size: int, num_microbatches: int) -> Plan:
    config = PipelineConfig(max_in_flight=None if share is None else share * pp_size)
    return make_plan(schedule, pp_size, num_microbatches, settings=config.settings)


def slope(plan: Plan, time: float, latency: float) -> float:
    early, late = (plan.simulate(time, time, time, p2p).makespan for p2p in (latency, 2 * latency))
    return (late - early) / latency


if __name__ == "__main__":
    main()
