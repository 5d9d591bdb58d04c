"""Recomputation as an action of its own (R) against checkpointing within the model, on emulated compute.

    python -m benchmarks.recompute --pp 4 --microbatches 4 8 16

A rank sleeps for 20 ms in the F, B and W of each microbatch and as long again to recompute it, shared out over its
chunks; messages are real. The plan's figures are simulated with these times.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapipe.plan import Settings, make_plan

from .emulation import Deferring, Stage, Whole
from .launching import launch
from .rounds import Emulated, take_turns
from .tables import FOLDER, save_table

HEADER = ["schedule", "microbatches", "checkpoint, ms", "R, ms", "checkpoint / R", "by the plan"]
NOTES = """Medians of interleaved steps. A split backward has one W pending at most (`max_pending_weights=1`), which is
the default with `config.recompute`; in the rows *all pending* checkpointing has as many as the schedule, and holds what
it has recomputed for all of them."""
SCHEDULES = {"1f1b": None, "interleaved_1f1b": 2, "zb1p": None, "v_half": None}


def saving(work: type[Whole]) -> Callable[..., Tensor]:
    """A stage's work that saves its input for the backward, so that there is something to recompute."""

    class Saving(work):  # type: ignore[misc, valid-type]
        @staticmethod
        def forward(ctx: Any, x: Tensor, *args: Any) -> Tensor:
            ctx.save_for_backward(x)
            return work.forward(ctx, x, *args)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            assert ctx.saved_tensors
            return work.backward(ctx, grad)

    return Saving.apply  # type: ignore[no-any-return]


WORK = {"whole": saving(Whole), "deferring": saving(Deferring)}


class Recomputing(Emulated):
    """Emulated stages that recompute.

    Args:
        is_action: as an R; else within the stage, by torch.
    """

    def __init__(self, name: str, num_microbatches: int, seconds: float, is_action: bool, **config: Any) -> None:
        self.is_action = is_action
        num_chunks = 2 if SCHEDULES[name] == 2 or name.startswith("v") else 1
        if SCHEDULES[name] is not None:
            config["num_chunks"] = num_chunks
        if is_action:
            config["recompute"] = "all"
        super().__init__(f"megapipe {name}", num_microbatches, lambda *_: seconds / num_chunks, 16, **config)

    def _make_stage(self, index: int, num_stages: int, how: str, config: Any) -> Stage:
        work = WORK[how]

        def recomputed(x: Tensor, *args: Any) -> Tensor:
            made: Tensor = checkpoint(work, x, *args, use_reentrant=False)
            return made

        return Stage(index, work if self.is_action else recomputed, self.emulation, config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument(
        "--milliseconds", type=float, default=20.0, help="of each of F, R, B, W, of a rank's microbatch"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    parser.add_argument("--folder", type=Path, default=FOLDER)
    args = parser.parse_args()
    rows = launch(args.pp, measure, args)
    title = f"Recomputation on emulated compute, pp={args.pp}, {args.milliseconds:g} ms"
    save_table(f"recompute-pp{args.pp}", title, HEADER, rows, NOTES, args.folder)


def measure(rank: int, args: argparse.Namespace) -> list[list[str]]:
    seconds = args.milliseconds / 1000
    rows = []
    for m in args.microbatches:
        cases = [(name, most) for name in args.schedules for most in ([1, None] if name == "zb1p" else [1])]
        emulated = [Recomputing(name, m, seconds, True) for name in args.schedules]
        emulated += [Recomputing(name, m, seconds, False, max_pending_weights=most) for name, most in cases]
        times = [median(step.duration for step in steps) for steps in take_turns(emulated, args.rounds, 1, 1)]
        own = dict(zip(args.schedules, times))
        for (name, most), time in zip(cases, times[len(args.schedules) :]):
            rows.append(row(args.pp, m, name, most, time, own[name]))
    return rows


def row(pp_size: int, num_microbatches: int, name: str, most: int | None, within: float, own: float) -> list[str]:
    sizes = (name, pp_size, num_microbatches, SCHEDULES[name])
    plan = make_plan(*sizes, settings=Settings(recompute=True)).simulate()
    plan_within = make_plan(*sizes, settings=Settings(max_pending_weights=most)).simulate(backward_input=2.0)
    return [
        name + (" (all pending)" if most is None else ""),
        str(num_microbatches),
        f"{1000 * within:.0f}",
        f"{1000 * own:.0f}",
        f"{within / own:.3f}",
        f"{plan_within.makespan / plan.makespan:.3f}",
    ]


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
