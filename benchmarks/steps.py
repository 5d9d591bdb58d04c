"""Training steps that follow each other without a barrier, optimizer included: what the global norm costs.

    python -m benchmarks.steps --pp 4 --microbatches 8

A rank sleeps for 20 ms in the F, B and W of each microbatch, shared out over its chunks; messages, norms and AdamW are
real. Clipping needs the norm of all ranks, so it holds each step up until the last rank is done. Validated afterwards
it does not.
"""

from __future__ import annotations

import argparse
import itertools
import math
import time
from typing import Any

import torch
import torch.distributed as dist

from megapipe import PipelinedOptimizer, PostValidatedOptimizer, clip_grad_norm_
from megapipe.plan import make_plan

from .launching import gather
from .options import run
from .rounds import Emulated
from .runners import is_there
from .tables import Table

CASES = [
    ("megapipe zbv", "post-validated"),
    ("megapipe zb2p", "post-validated"),
    ("megapipe 1f1b", "post-validated"),
    ("megapipe zbv", "clipped"),
    ("megapipe zb2p", "clipped"),
    ("megapipe 1f1b", "clipped"),
    ("torch ZBVZeroBubble", "clipped"),
    ("torch 1F1B", "clipped"),
    ("megatron-core 1f1b", "clipped"),
    ("megatron-core interleaved", "clipped"),
]
HEADER = "library and schedule | optimizer step | per step / ideal | longest / ideal | one step's plan / ideal"
NOTES = """*per step*: from the first rank's begin of the first step to the last rank's end of the last, over their
number. *ideal*: m (F + B + W). *longest*: of the steps, from the last rank's end of one to that of the next. *clipped*:
each rank waits for the norm of all before it steps. *post-validated*: it steps, and hears of the norm in the next
warmup. *one step's plan*: with nominal times, from the first rank's begin to the last one's end: what a step takes when
all ranks meet after it."""


class Case:
    """A runner with an optimizer around it."""

    def __init__(self, name: str, kind: str, args: argparse.Namespace) -> None:
        self.name, self.kind, self.args = name, kind, args
        self.emulated: Any = Emulated(name, args.microbatches, args.milliseconds / 1000, args.message_bytes)
        modules = self.emulated.runner.modules
        if kind == "post-validated":
            self.optimizer: PipelinedOptimizer = PostValidatedOptimizer(modules, torch.optim.AdamW, max_norm=1.0)
            self.emulated.runner.config.post_validated_optimizer = self.optimizer
        else:
            self.optimizer = PipelinedOptimizer(modules, torch.optim.AdamW)

    def step(self) -> None:
        self.emulated.emulation.calls.clear()
        self.optimizer.zero_grad()
        self.emulated.runner.step()
        if self.kind == "clipped" and not clip_grad_norm_(self.optimizer.models, 1.0).isfinite():
            return
        self.optimizer.step()

    def run(self, num_steps: int) -> list[list[float]]:
        """When each rank began, and when it ended each step."""
        dist.barrier()
        times = [time.perf_counter()]
        for _ in range(num_steps):
            self.step()
            times.append(time.perf_counter())
        self.optimizer.finalize()
        return gather(times)


DEFAULTS = {"pp": 4, "microbatches": 8, "milliseconds": 20.0, "message_bytes": 64 * 1024, "steps": 20}


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    rows = []
    for name, kind in CASES:
        if is_there(name):
            case = Case(name, kind, args)
            case.run(2)
            rows.append(row(case, case.run(args.steps), args))
    title = f"{args.steps} steps without a barrier, pp={args.pp}, m={args.microbatches}, {args.milliseconds:g} ms"
    return [(f"steps-pp{args.pp}-m{args.microbatches}", title, HEADER, rows, NOTES)]


def row(case: Case, ranks: list[list[float]], args: argparse.Namespace) -> list[str]:
    ideal = 3 * args.microbatches * args.milliseconds / 1000
    ends = [max(ends) for ends in zip(*ranks)]
    total = ends[-1] - min(times[0] for times in ranks)
    longest = max((end - before for before, end in itertools.pairwise(ends[1:])), default=math.nan)
    package, _, schedule = case.name.partition(" ")
    plan = ""
    if package == "megapipe":
        makespan = make_plan(schedule, args.pp, args.microbatches).simulate().makespan
        plan = f"{makespan / (3 * args.microbatches):.3f}"
    return [case.name, case.kind, f"{total / args.steps / ideal:.3f}", f"{longest / ideal:.3f}", plan]


if __name__ == "__main__":
    run(measure, **DEFAULTS)
