"""What a microbatch costs the host, beyond the stage's own forward and backward.

    python -m benchmarks.host --pp 2
    python -m benchmarks.host --pp 2 --calls
    python -m benchmarks.host --pp 2 --profile "megapipe zbv"

Nothing sleeps and the tensors are tiny, so all that is measured is the schedule, its messages and autograd.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import time
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import megapipe
from megapipe.weight_grad import convert

from .launching import gather, launch
from .runners import Runner, is_there, make_runner
from .tables import FOLDER, median_and_spread, save_table

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
HEADER = [
    "library and schedule",
    "chunks",
    "wall",
    "stages alone",
    "overhead",
    "overhead, main thread",
    "overhead, process",
]
NOTES = """Microseconds per microbatch and rank, mean of the ranks, medians of interleaved steps, in brackets the middle
half of the steps. *stages alone*: forward and backward of the rank's chunks, without a pipeline. *overhead*: the rest.
The wall includes waits for the other rank. The CPU time of the main thread does not, and that of the process includes
gloo's threads. *bare-loop*: the same actions over `isend` and `irecv`, which no package can beat by much."""

PLACES = {
    "stages": ("stages/", "messages.py"),
    "messages": ("transports/", "p2p_communication.py", "runtime/links.py"),
    "weight gradients": ("weight_grad/",),
    "verbs and all else": ("",),
}
"""Files of megapipe; the first place that fits."""
OTHERS = "model, torch, gloo"
NOTES_ON_CALLS = """Calls of Python functions and builtins per microbatch and rank, mean of the ranks, by cProfile.
They do not depend on what else the machine does. A builtin counts where it is called. *stages*: their inputs and
outputs, the checks of these, the edges of the graph, the loss. *messages*: channels, receives posted ahead, sends under
way. *weight gradients*: around a backward, and the layers that defer."""


class Layer(nn.Module):
    """One stage: a linear layer, with Megatron's hook for its input."""

    def __init__(self, index: int, num_stages: int, how: str, config: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if how == "deferring":
            convert(self)
        self.config = config
        self._example = torch.zeros(ROWS, 1, WIDTH) if index == 0 else None
        self._input: Tensor | None = None

    def set_input_tensor(self, inputs: Any) -> None:
        self._input = inputs[0] if isinstance(inputs, list) else inputs

    def forward(self, x: Tensor | None = None) -> Tensor:
        x = self._input if x is None else x
        output: Tensor = self.linear(self._example if x is None else x)
        return output.relu()  # a tensor of its own: Megatron's schedules do not take views


def main() -> None:
    args = parse()
    names = [name for name in args.runners.split(",") if is_there(name)]
    if args.pp == 1:
        names = [name for name in names if "zb" not in name.lower()]
    if args.profile:
        print(launch(args.pp, profile, args))
        return
    if args.calls:
        title = f"Calls, pp={args.pp}, m={args.microbatches}"
        rows = launch(args.pp, count_calls, args, names)
        save_table(
            f"calls-pp{args.pp}",
            title,
            ["library and schedule", "all", *PLACES, OTHERS],
            rows,
            NOTES_ON_CALLS,
            args.folder,
        )
        return
    rows = launch(args.pp, measure, args, names)
    title = f"Host cost, pp={args.pp}, m={args.microbatches}, tensors of {ROWS} x {WIDTH}"
    save_table(f"host-pp{args.pp}", title, HEADER, rows, NOTES, args.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--runners", default=",".join(RUNNERS))
    parser.add_argument("--calls", action="store_true", help="count calls instead of time")
    parser.add_argument("--profile", metavar="RUNNER", help="print where rank 0 spends its time instead")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args()


def measure(rank: int, args: argparse.Namespace, names: list[str]) -> list[list[str]]:
    runners = [make_runner(name, args.microbatches, Layer, ROWS, width=WIDTH) for name in names]
    for runner in runners:
        runner.step()
        runner.step()
    times: list[list[tuple[float, ...]]] = [[] for _ in runners]
    for _ in range(args.rounds):
        for runner, mine in zip(runners, times):
            mine.append((*_timed(runner.step), *_timed(functools.partial(bare, runner, args.microbatches))))
    everybody = gather(times)
    return [row(runner, [rank[k] for rank in everybody], args.microbatches) for k, runner in enumerate(runners)]


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


def count_calls(rank: int, args: argparse.Namespace, names: list[str]) -> list[list[str]]:
    rows = []
    for name in names:
        counts: Counter[str] = Counter()
        stats: dict[Any, Any] = _profiled(name, args).stats  # type: ignore[attr-defined]
        for (file, _, _), (_, num_calls, _, _, callers) in stats.items():
            if file == "~":  # a builtin
                for (caller, _, _), (num_calls, *_) in callers.items():
                    counts[_place_of(caller)] += num_calls
            else:
                counts[_place_of(file)] += num_calls
        together: Counter[str] = sum(gather(counts), Counter())
        per_microbatch = {place: n / args.pp / args.rounds / args.microbatches for place, n in together.items()}
        columns = [sum(per_microbatch.values()), *(per_microbatch.get(place, 0) for place in (*PLACES, OTHERS))]
        rows.append([name, *(f"{number:.0f}" for number in columns)])
    return rows


def _place_of(file: str) -> str:
    path = Path(file)
    package = Path(megapipe.__file__).parent
    if package not in path.parents:
        return OTHERS
    inner = path.relative_to(package).as_posix()
    return next(place for place, starts in PLACES.items() if inner.startswith(starts))


def profile(rank: int, args: argparse.Namespace) -> str:
    stats = _profiled(args.profile, args)
    if rank == 0:
        print(f"{args.rounds * args.microbatches} microbatches", flush=True)
        stats.sort_stats("tottime").print_stats(45)
    return ""


def _profiled(name: str, args: argparse.Namespace) -> pstats.Stats:
    runner = make_runner(name, args.microbatches, Layer, ROWS, width=WIDTH)
    for _ in range(3):
        runner.step()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(args.rounds):
        runner.step()
    profiler.disable()
    return pstats.Stats(profiler)


if __name__ == "__main__":
    main()
