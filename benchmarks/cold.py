"""The first steps of a fresh process, one by one: whatever is made, compiled or collected at first shows here.

    python -m benchmarks.cold --pp 8 --microbatches 32

Ranks sleep instead of computing, as in `benchmarks.schedules`. Each runner has processes of its own.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from .launching import in_turns, launch
from .options import options
from .rounds import Emulated
from .runners import is_there
from .tables import save_table

PYTHONS = ", Python's own collection"
"""At the end of a runner's name: with `gc_interval=None`."""
RUNNERS = ["megapipe zbv", f"megapipe zbv{PYTHONS}", "torch ZBVZeroBubble"]
HEADER = "library and schedule | 1st | 2nd | 3rd | median from the 2nd on | longest of these | longest / median"
NOTES = """Single steps of a fresh process in seconds, from the first rank's begin to the last one's end."""


def main() -> None:
    args = options(pp=8, microbatches=32, milliseconds=20.0, steps=20, runners=";".join(RUNNERS))
    seconds = {name: launch(args.pp, measure, args, name) for name in filter(is_there, args.runners.split(";"))}
    title = f"{args.steps} steps from a cold start, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms"
    name = f"cold-pp{args.pp}-m{args.microbatches}"
    save_table(name, title, HEADER, [row(*one) for one in seconds.items()], NOTES, args.folder)


def measure(rank: int, args: argparse.Namespace, name: str) -> list[float]:
    """Seconds of each step."""
    config: dict[str, Any] = {"gc_interval": None} if name.endswith(PYTHONS) else {}
    emulated = Emulated(name.removesuffix(PYTHONS), args.microbatches, args.milliseconds / 1000, **config)
    return in_turns([emulated.runner.step], args.steps, 0)[0]


def row(name: str, seconds: list[float]) -> list[str]:
    later = seconds[1:]
    times = [*seconds[:3], median(later), max(later)]
    return [name, *(f"{time:.3f}" for time in times), f"{max(later) / median(later):.3f}"]


if __name__ == "__main__":
    main()
