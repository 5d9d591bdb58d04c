"""The first steps of a fresh process, one by one: whatever is made, compiled or collected at first shows here.

    python -m benchmarks.cold --pp 8 --microbatches 32

Ranks sleep instead of computing, as in `benchmarks.schedules`. Each runner has processes of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import Any

from .launching import gather, launch
from .rounds import Emulated
from .runners import is_there
from .schedules import make
from .tables import FOLDER, save_table, with_version

PYTHONS = ", Python's own collection"
"""At the end of a runner's name: with `gc_interval=None`."""
RUNNERS = ["megapipe zbv", f"megapipe zbv{PYTHONS}", "torch ZBVZeroBubble"]
HEADER = ["library and schedule", "1st", "2nd", "3rd", "median from the 2nd on", "longest of these", "longest / median"]
NOTES = """Single steps of a fresh process in seconds, from the first rank's begin to the last one's end."""


def main() -> None:
    args = parse()
    names = [name for name in args.runners.split(";") if is_there(name)]
    seconds = {name: launch(args.pp, measure, args, name) for name in names}
    title = f"{args.steps} steps from a cold start, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms"
    name = f"cold-pp{args.pp}-m{args.microbatches}"
    save_table(name, title, HEADER, [row(*one) for one in seconds.items()], NOTES, args.folder)
    plot(seconds, args.folder / f"{with_version(name)}.svg")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--milliseconds", type=float, default=20.0, help="of each of F, B, W, of a rank's microbatch")
    parser.add_argument("--message-bytes", type=int, default=64 * 1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--runners", default=";".join(RUNNERS), help="separated by semicolons")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args(argv)


def measure(rank: int, args: argparse.Namespace, name: str) -> list[float]:
    """Seconds of each step."""
    config: dict[str, Any] = {"gc_interval": None} if name.endswith(PYTHONS) else {}
    emulated: Emulated = make(name.removesuffix(PYTHONS), args, args.milliseconds / 1000, **config)
    for _ in range(args.steps):
        emulated.step()
    everybody = gather([(begin, end) for begin, end, _ in emulated.steps])
    return [max(end for _, end in ranks) - min(begin for begin, _ in ranks) for ranks in zip(*everybody)]


def row(name: str, seconds: list[float]) -> list[str]:
    later = seconds[1:]
    times = [*seconds[:3], median(later), max(later)]
    return [name, *(f"{time:.3f}" for time in times), f"{max(later) / median(later):.3f}"]


def plot(seconds: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.5), layout="constrained")
    axes = figure.subplots()
    for name, times in seconds.items():
        axes.plot(range(1, len(times) + 1), times, marker="o", markersize=3, label=name)
    axes.set(xlabel="step of a fresh process", ylabel="seconds", ylim=(0, None))
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
