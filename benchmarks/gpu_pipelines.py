"""Steps of pipelines by schedule, beside torch.distributed.pipelining's, and what each rank holds in memory.

With several GPUs each has a rank. With one there is one rank for the times, since two that share a GPU take turns; for
the memory ranks share it.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe import parallel_state
from megapipe.weight_grad import convert

from .gpt_layers import WARMUP, example, make_layers
from .launching import gather, in_turns
from .memory import memory_of
from .runners import FedStage, Runner, make_runner
from .tables import Table, median_and_spread

SCHEDULES = ["gpipe", "1f1b", "interleaved_1f1b", "zb1p", "zbv", "v_half", "v_min", "dualpipev"]
TORCH = ["GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble"]
STEPS_HEADER = "schedule | step, ms | tokens/s | against megapipe 1f1b"
STEPS_NOTES = """Medians of interleaved steps, in brackets the middle half, of the slowest rank, from the moment that
all ranks begin until its device is done; the ratio is taken step by step. *torch*: torch.distributed.pipelining, with
the same layers of torch's own. With one rank nothing is sent, and schedules differ in what the host does and in how
the backward is split; torch's schedules with two chunks need two ranks."""
MEMORY_HEADER = "schedule | peak by rank, MB | messages"
MEMORY_NOTES = """The most that a step has on each rank, parameters and gradients not counted. *offloaded*: by
`offload_activations=1`. *messages*: what carries them. Ranks that share a GPU take turns, so nothing here is a time."""

WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "posted early": {"p2p_lookahead": 1},
    "offloaded": {"offload_activations": 4.0},
    "recomputed": {"recompute": "all"},
}
WAYS_HEADER = "schedule | way | step, ms | peak by rank, MB | gradients off by"
WAYS_NOTES = """*posted early*: receives of messages that NCCL's buffers do not hold (`p2p_lookahead=1`). *offloaded*:
`offload_activations=4`, the time that PCIe 5 takes for what these layers save; with one rank nothing waits that long.
*recomputed*: `recompute="all"`. Times are medians of steps, in brackets the middle half, of the slowest rank. *off by*:
the largest difference of a gradient to that of the first way: 0 but for kernels that add up in any order, as
attention's backward does."""


class Stage(FedStage):
    """A chunk of the layers, for all packages."""

    def __init__(self, args: argparse.Namespace, index: int, num_stages: int, how: str, config: Any) -> None:
        layers = make_layers(args, args.layers // num_stages)  # which seeds what is drawn behind it
        super().__init__(config, example(args).requires_grad_() if index == 0 else None)
        self.layers = layers
        if how == "deferring":
            convert(self)

    def forward(self, x: Tensor | None = None) -> Tensor:
        output: Tensor = self.layers(self.fed(x if self._example is None else self._example))
        return output


def mean_square(output: Tensor, target: Any = None) -> Tensor:
    """A loss whose gradients are not zero: with zeros a GPU draws less power, and runs faster."""
    return output.float().square().mean()


def fitting(args: argparse.Namespace, num_ranks: int) -> argparse.Namespace:
    """With a layer for each of two chunks on each rank, or more, so that the model is the same for all schedules; and
    with as many microbatches as all of them can share out."""
    unit = 2 * num_ranks
    sizes = {"layers": -(-args.layers // unit) * unit, "microbatches": -(-args.microbatches // unit) * unit}
    return argparse.Namespace(**{**vars(args), **sizes})


def make(args: argparse.Namespace, name: str, **options: Any) -> Runner:
    if name.startswith("megapipe"):
        options["pipeline_dtype"] = getattr(torch, args.dtype)
    elif args.device == "cuda" and dist.get_world_size() > 1:
        options["group"] = nccl_group()
    return make_runner(
        name,
        args.microbatches,
        functools.partial(Stage, args),
        args.seq_length,
        loss=mean_square,
        width=args.hidden_size,
        **options,
    )


@functools.cache
def nccl_group() -> dist.ProcessGroup | None:
    """Over which torch's pipelines send: the ranks' own group is gloo's."""
    return dist.new_group(backend="nccl")


def begin(rank: int, args: argparse.Namespace) -> None:
    if args.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(dist.get_world_size())


def measure_steps(rank: int, args: argparse.Namespace) -> list[Table]:
    begin(rank, args)
    num_ranks = dist.get_world_size()
    peers = TORCH if num_ranks > 1 else TORCH[:2]
    names = ["1f1b", *(name for name in SCHEDULES if name != "1f1b")]
    runners = [make(args, name) for name in [*(f"megapipe {one}" for one in names), *(f"torch {one}" for one in peers)]]
    slowest = lambda step: max(gather(timed(args.device, step)))  # noqa: E731
    times = in_turns([runner.step for runner in runners], args.repeats, WARMUP, slowest)
    rows, tokens = [], args.microbatches * args.seq_length
    for runner, mine in zip(runners, times):
        ratio = median_and_spread([one / base for one, base in zip(mine, times[0])])
        rate = median_and_spread([tokens / one for one in mine], "{:,.0f}")
        rows.append([runner.name, median_and_spread([1e3 * one for one in mine], "{:.1f}"), rate, ratio])
    return [("gpu-schedules", f"Steps by schedule, {sizes_of(args)}", STEPS_HEADER, rows, STEPS_NOTES)]


def sizes_of(args: argparse.Namespace) -> str:
    return f"pp={dist.get_world_size()}, m={args.microbatches}"


def timed(device: str, step: Callable[[], None]) -> float:
    """Seconds until the device is done."""
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure_memory(rank: int, args: argparse.Namespace) -> list[Table]:
    begin(rank, args)
    is_shared = dist.get_world_size() > torch.cuda.device_count()
    messages = "gloo" if args.device == "cpu" else "host memory" if is_shared else "NCCL"
    rows = []
    for name, moved in [*((name, None) for name in SCHEDULES), *((name, 1.0) for name in ("gpipe", "1f1b", "zbv"))]:
        runner = make(args, f"megapipe {name}", offload_activations=moved)
        for _ in range(2):  # connected, and with gradients
            runner.step()
        peaks = gather(memory_of(args.device, runner.step).peak)
        rows.append([name + ", offloaded" * bool(moved), ", ".join(f"{one / 2**20:,.1f}" for one in peaks), messages])
        del runner
        if args.device == "cuda":
            torch.cuda.empty_cache()  # for the others on this GPU
    return [("gpu-schedules-memory", f"Memory by schedule, {sizes_of(args)}", MEMORY_HEADER, rows, MEMORY_NOTES)]


def measure_ways(rank: int, args: argparse.Namespace) -> list[Table]:
    begin(rank, args)
    rows = []
    for name in ("1f1b", "zbv"):
        wanted: list[Tensor] = []
        for way, config in WAYS.items():
            runner = make(args, f"megapipe {name}", **config)
            runner.step()  # connects
            for module in runner.modules:
                module.zero_grad()
            peak = memory_of(args.device, runner.step).peak
            found = [p.grad.clone() for module in runner.modules for p in module.parameters() if p.grad is not None]
            wanted = wanted or found
            difference = max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))
            times = [1e3 * max(gather(timed(args.device, runner.step))) for _ in range(args.repeats)]
            peaks, differences = zip(*gather((peak, difference)))
            by_rank = ", ".join(f"{one / 2**20:,.1f}" for one in peaks)
            rows.append([name, way, median_and_spread(times, "{:.1f}"), by_rank, f"{max(differences):.0e}"])
    return [("gpu-ways", f"Messages and activations, {sizes_of(args)}", WAYS_HEADER, rows, WAYS_NOTES)]
