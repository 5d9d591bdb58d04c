"""What a microbatch costs the host, beyond the stage's own forward and backward.

    python -m benchmarks.host --pp 2

Nothing sleeps and the tensors are tiny, so all that is measured is the schedule, its messages and autograd.
"""

from __future__ import annotations

import argparse
import functools
import time
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe.weight_grad import convert

from .launching import gather, in_turns
from .options import run
from .runners import FedStage, Runner, is_there, make_runner
from .tables import Table, median_and_spread

WIDTH, ROWS = 8, 4
RUNNERS = [
    "bare-loop 1f1b",
    "megapipe 1f1b",
    "torch 1F1B",
    "megatron-core 1f1b",
    "megapipe zb1p",
    "bare-loop zbv",
    "megapipe zbv",
    "torch ZBVZeroBubble",
]
HEADER = "library and schedule | chunks | wall | stages alone | overhead | overhead, main thread | overhead, process"
NOTES = """Microseconds per microbatch and rank, mean of the ranks, medians of interleaved steps, in brackets the middle
half of the steps. *stages alone*: forward and backward of the rank's chunks, without a pipeline. *overhead*: the rest.
The wall includes waits for the other rank. The CPU time of the main thread does not, and that of the process includes
gloo's threads. *bare-loop*: the same actions over `isend` and `irecv`, which no package can beat by much."""


class Layer(FedStage):
    """One stage: a linear layer."""

    def __init__(self, index: int, num_stages: int, how: str, config: Any) -> None:
        super().__init__(config, torch.zeros(ROWS, 1, WIDTH) if index == 0 else None)
        self.linear = nn.Linear(WIDTH, WIDTH)
        if how == "deferring":
            convert(self)

    def forward(self, x: Tensor | None = None) -> Tensor:
        output: Tensor = self.linear(self.fed(x))
        return output.relu()  # a tensor of its own: Megatron's schedules do not take views


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    names = [name for name in args.runners.split(",") if is_there(name) and (args.pp > 1 or "zb" not in name.lower())]
    runners = [make_runner(name, args.microbatches, Layer, ROWS, width=WIDTH) for name in names]
    alone = [functools.partial(bare, runner, args.microbatches) for runner in runners]
    times = in_turns([*(runner.step for runner in runners), *alone], args.rounds, 2, _timed)
    times = [[(*step, *own) for step, own in zip(*both)] for both in zip(times, times[len(runners) :])]
    everybody = gather(times)
    rows = [row(runner, [rank[k] for rank in everybody], args.microbatches) for k, runner in enumerate(runners)]
    title = f"Host cost, pp={args.pp}, m={args.microbatches}, tensors of {ROWS} x {WIDTH}"
    return [(f"host-pp{args.pp}", title, HEADER, rows, NOTES)]


def _timed(function: Any) -> tuple[float, ...]:
    """Wall, CPU of this thread, CPU of the process."""
    dist.barrier()
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    before = [clock() for clock in clocks]
    function()
    return tuple(clock() - start for clock, start in zip(clocks, before))


def bare(runner: Runner, num_microbatches: int) -> None:
    for _ in range(num_microbatches):
        for module in runner.modules:
            x = torch.zeros(ROWS, 1, WIDTH, requires_grad=True)
            output = module(x)
            output.backward(torch.ones_like(output))


def row(runner: Runner, ranks: list[list[tuple[float, ...]]], num_microbatches: int) -> list[str]:
    """`ranks`: per rank and step wall, thread, process of the step, and the same of the rank's own work; in seconds."""
    steps = [[1e6 * fmean(column) / num_microbatches for column in zip(*step)] for step in zip(*ranks)]
    columns = list(zip(*steps))
    net = [median(whole) - median(own) for whole, own in zip(columns[:3], columns[3:])]
    return [
        runner.name,
        str(runner.num_chunks),
        median_and_spread(columns[0], "{:.0f}"),
        f"{median(columns[3]):.0f}",
        *(f"{one:.0f}" for one in net),
    ]


if __name__ == "__main__":
    run(measure, pp=2, microbatches=64, rounds=25, runners=",".join(RUNNERS))
