"""How long training stands still for a save, against the copy to the host's memory, which nothing can save.

    python -m benchmarks.saving --megabytes 192

Two ranks save a model with AdamW's state: to the disk, and to the disk in the background.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from megapipe import parallel_state
from megapipe.checkpoint import Checkpointer

from .launching import seconds
from .options import run
from .tables import Table, median_and_spread

WIDTH = 1024


HEADER = "save | the copy alone | training stands still for | in all | until it is safe"


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    parallel_state.initialize_model_parallel(2)
    num_layers = args.megabytes * 2**20 // (3 * 4 * WIDTH**2)  # weights and two moments in float32
    chunk = nn.ModuleDict({str(rank * num_layers + i): nn.Linear(WIDTH, WIDTH, bias=False) for i in range(num_layers)})
    optimizer = torch.optim.AdamW(chunk.parameters())
    for parameter in chunk.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    tensors = [*chunk.parameters(), *states]
    with tempfile.TemporaryDirectory() as disk:
        disk = shared(disk)
        at_once = Checkpointer(Path(disk) / "at once", chunk, optimizer, keep_last=1)
        behind = Checkpointer(Path(disk) / "behind", chunk, optimizer, keep_last=1, asynchronous=True)
        kinds = {
            "to the disk": (at_once.save, at_once.wait),
            "to the disk, in the background": (behind.save, behind.wait),
        }
        times: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in kinds}
        for step in range(args.repeats + 1):
            for kind, (save, wait) in kinds.items():
                copy = seconds(lambda: [tensor.detach().to("cpu", copy=True) for tensor in tensors])
                stall = seconds(lambda save=save, step=step: save(step))
                times[kind].append((copy, stall, stall + seconds(wait)))
        dist.barrier()
    rows = [row(kind, measured[1:]) for kind, measured in times.items()]  # the first makes folders and locks
    notes = (
        f"{args.megabytes} MB of weights and optimizer state on each of two ranks. *The copy alone*: of the same "
        f"tensors to the host's memory, into fresh memory as a save does. *In all*: against the copy. Milliseconds, "
        f"medians of {args.repeats} in turn, in brackets the middle half."
    )
    return [("saving", "How long a save stops training", HEADER, rows, notes)]


def shared(folder: str) -> str:
    """Rank 0's."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    return folders[0]


def row(kind: str, measured: list[tuple[float, float, float]]) -> list[str]:
    copy, stall, safe = ([1000 * value for value in values] for values in zip(*measured))
    ratio = median_and_spread([whole / alone for alone, whole in zip(copy, stall)], "{:.2f}")
    return [
        kind,
        *(median_and_spread(values, "{:.0f}") for values in (copy, stall)),
        ratio,
        median_and_spread(safe, "{:.0f}"),
    ]


if __name__ == "__main__":
    run(measure, 2, megabytes=192, repeats=7)  # of each rank
