"""Real compute on two ranks, a core each: layers of torch's `parallelize_module`, over a link of given latency.

    python -m benchmarks.tensor_parallel

A layer gathers the sequence before its two products and scatters it behind them, forward and backward. What waits for
the link is an overlap window, in which a product of a pending W runs.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Iterator
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

import megapipe
from megapipe import parallel_state, weight_grad
from megapipe.overlap import fill_window, filling_windows

from .delays import delayed_collectives
from .launching import in_turns
from .options import run
from .tables import Table, median_and_spread

TP = 2
SETTINGS = {  # schedules, `min_pending_weights` and `weights_per_window`
    "no_pipelining": ("no_pipelining", 0, 0),
    "no_pipelining, own Ws in windows": ("no_pipelining", 0, 1),
    "zbv": ("zbv", 0, 0),
    "zbv, 1 more W pending, in windows": ("zbv", 1, 1),
}
HEADER = "schedule | latency, ms | step, ms | over without"


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    mesh = init_device_mesh("cpu", (1, TP), mesh_dim_names=("pp", "tp"))
    parallel_state.initialize_from_mesh(mesh)
    data = torch.randn(args.microbatches, args.tokens // TP, 1, args.hidden)
    runs = {name: make_run(*setting, data, args, mesh) for name, setting in SETTINGS.items()}
    rows = []
    for latency in args.latencies:
        with delayed_collectives(latency / 1000):
            turns = in_turns(list(runs.values()), args.rounds)
        times = {name: [1000 * one for one in mine] for name, mine in zip(runs, turns)}
        for name, (schedule, *_) in SETTINGS.items():
            ratio = median(times[name]) / median(times[schedule])
            shown = "-" if name == schedule else f"{ratio:.3f}"
            rows.append([name, f"{latency:g}", median_and_spread(times[name], "{:.0f}"), shown])
    title = f"Tensor-parallel layers on real compute, tp={TP}, m={args.microbatches}"
    notes = (
        f"{args.layers} layers of two products, hidden size {args.hidden}, {args.tokens} tokens per microbatch, on two "
        "ranks with a core each. Each collective ends no sooner than the latency after its start; without latency it "
        "is gloo's. Medians of interleaved steps, in brackets the middle half. Each layer has four windows and two "
        f"products of W. An empty window takes {1e6 * time_of_a_window():.2f} us of the host."
    )
    return [("tensor-parallel", title, HEADER, rows, notes)]


def make_run(schedule: str, num_pending: int, num_per_window: int, data: Tensor, args: Any, mesh: Any) -> Any:
    config = SimpleNamespace(
        hidden_size=args.hidden,
        sequence_parallel=True,
        tensor_model_parallel_size=TP,
        min_pending_weights=num_pending,
        weights_per_window=num_per_window,
    )
    infos = megapipe.stages_for_rank(schedule)
    chunks = [Stage(len(megapipe.distribute_layers(args.layers, info)), mesh["tp"], config) for info in infos]
    return functools.partial(
        lambda **options: megapipe.get_forward_backward_func(schedule)(data_iterator=iter(data), **options),
        forward_step_func=forward_step,
        model=chunks,
        num_microbatches=args.microbatches,
        seq_length=args.tokens,
        micro_batch_size=1,
    )


def forward_step(batches: Iterator[Tensor], chunk: nn.Module) -> Any:
    return chunk(next(batches)), lambda output: ((loss := output.square().mean()), loss.detach())


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return y


class Stage(nn.Module):
    def __init__(self, num_layers: int, mesh: Any, config: Any) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(config.hidden_size) for _ in range(num_layers)))
        self.config = config
        self.received: Tensor | None = None
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        for layer in self.layers:
            parallelize_module(layer, mesh, plan)
        weight_grad.convert(self)

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x if self.received is None else self.received)
        return y


def time_of_a_window(count: int = 20_000) -> float:
    """In seconds, with nothing to run."""
    with filling_windows(lambda: None):
        begin = time.perf_counter()
        for _ in range(count):
            fill_window()
        return (time.perf_counter() - begin) / count


if __name__ == "__main__":
    run(measure, TP, microbatches=8, layers=4, hidden=384, tokens=512, latencies=[0.0, 2.0, 5.0], rounds=7)  # in ms
