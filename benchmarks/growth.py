"""How the cost of planning grows: recording, checking and simulating plans, up to 256 ranks and 4096 microbatches.

python -m benchmarks.growth
"""

from __future__ import annotations

import argparse
import resource
import time

from megapipe.plan import Costs, make_plan, place_weights

from .options import run
from .tables import Table

SIZES = [(8, 32), (16, 64), (64, 256), (64, 1024), (256, 1024), (256, 4096)]
SEARCHED = 64
"""Ranks up to which the search for places of Ws is timed as well: beyond it only costs a longer wait here."""
HEADER = (
    "schedule | ranks | microbatches | actions | record, s | check, s | "
    "simulate, s | per action, us | search, s | memory, MB"
)


NOTES = """Seconds of processor time. *search*: the places of Ws for F : B : W = 1 : 1.4 : 0.6, as the tuner makes it.
*memory*: the most so far, torch included."""


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    names = args.schedules.split(",")
    rows = [row(name, *size) for size in SIZES for name in names if num_actions(name, *size) <= args.most]
    return [("growth", "Planning, on one core", HEADER, rows, NOTES)]


def num_actions(name: str, pp_size: int, num_microbatches: int) -> int:
    actions = make_plan(name, 2, 4).actions  # of which each schedule has the same for each rank and microbatch
    return sum(map(len, actions)) // 8 * pp_size * num_microbatches


def row(name: str, pp_size: int, num_microbatches: int) -> list[str]:
    start = time.process_time()
    plan = make_plan(name, pp_size, num_microbatches)
    recorded = time.process_time()
    plan.check()
    checked = time.process_time()
    plan.simulate(1, 1.4, 0.6, 0.05)
    simulated = time.process_time()
    count = sum(map(len, plan.actions))
    search = "-"
    if any(action.kind == "W" for action in plan.actions[0]) and pp_size <= SEARCHED and num_microbatches <= 256:
        costs = Costs(1.0, 1.4, 0.6, 0.05)
        place_weights(plan, costs)
        search = f"{time.process_time() - simulated:.2f}"
    return [
        name,
        str(pp_size),
        str(num_microbatches),
        str(count),
        f"{recorded - start:.2f}",
        f"{checked - recorded:.2f}",
        f"{simulated - checked:.2f}",
        f"{1e6 * (simulated - start) / count:.1f}",
        search,
        f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}",
    ]


if __name__ == "__main__":
    run(measure, 1, schedules="1f1b,zbv", most=6_500_000)  # actions of the largest plan
