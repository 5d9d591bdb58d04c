"""A step's time as it is foretold from the times measured in it: mean F, B and W of each stage, and latency.

    python -m benchmarks.prediction --pp 4

The stages sleep; the steps are recorded as users record theirs (`config.record_timeline`), and played by
`Timeline.predict`, which is what `megapipe tune` ranks schedules by.
"""

from __future__ import annotations

import argparse
from statistics import median

from megapipe import TimelineRecorder
from megapipe.analysis import split_bubble, step_time

from .options import run
from .rounds import Emulated, take_turns
from .runners import MEGAPIPE
from .tables import Table

HEADER = "schedule | measured, ms | predicted, ms | predicted / measured | latency, ms | bubble by cause"


NOTES = "From the first action's start to the last one's end, median of the recorded steps. All schedules in turns."


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    recorders = {name: TimelineRecorder(args.steps) for name in MEGAPIPE}
    emulated = [
        Emulated(f"megapipe {name}", args.microbatches, args.milliseconds / 1000, record_timeline=recorder)
        for name, recorder in recorders.items()
    ]
    take_turns(emulated, args.steps, 2, block=1)
    rows = [row(name, recorder) for name, recorder in recorders.items()]
    title = f"Prediction, pp={args.pp}, m={args.microbatches}, emulated F, B and W of {args.milliseconds:g} ms"
    return [(f"prediction-pp{args.pp}", title, HEADER, rows, NOTES)]


def row(name: str, recorder: TimelineRecorder) -> list[str]:
    timeline = recorder.gather()
    measured = median(map(step_time, timeline.steps))
    predicted = timeline.predict().makespan
    parts = ", ".join(f"{100 * share:.1f} % {cause}" for cause, share in split_bubble(timeline).shares.items())
    return [
        name,
        f"{measured:.1f}",
        f"{predicted:.1f}",
        f"{predicted / measured:.3f}",
        f"{timeline.latency:.2f}",
        parts,
    ]


if __name__ == "__main__":
    run(measure, pp=4, microbatches=8, milliseconds=20.0, steps=8)
