"""What captured stages cost and gain.

    python -m benchmarks.capture

Two tables: the time and memory of a backward in two against one and against eager; how long a capture takes.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from megapipe.graph import capture
from megapipe.weight_grad import DeferredGrads

from .gpt_layers import GPTConfig, Layer
from .launching import in_turns
from .memory import live_bytes, live_tensors
from .options import run
from .tables import Table, median_and_spread

HEADER = "a stage of | how | F + B + W | against eager | against one backward | saved | held from B to W"
NOTES = """Transformer layers of [tokens, hidden] tensors. Medians of interleaved runs, in brackets the middle half; the
ratios are taken run by run. *saved*: what the forward keeps, without weights. *held*: what W keeps of it and of B's,
against *saved*. Gradients are added to those that are there."""


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    shapes = ((2, 256, 4, 128), (4, 32, 1, 16))
    split = [row for shape in shapes for row in backward_in_two(*shape, args.repeats)]
    sizes = [[str(num_layers), f"{seconds_of(num_layers):.2f} s"] for num_layers in (2, 8, 24)]
    return [
        ("capture-split", "A captured stage's backward in two", HEADER, split, NOTES),
        ("capture-size", "What a capture takes", "layers | capture", sizes, "Once the tracer has been imported."),
    ]


def layers_of(num_layers: int, hidden: int) -> nn.Sequential:
    config = GPTConfig(hidden_size=hidden, num_attention_heads=4)
    return nn.Sequential(*(Layer(config) for _ in range(num_layers)))


def backward_in_two(num_layers: int, hidden: int, batch: int, sequence: int, repeats: int) -> list[list[str]]:
    torch.manual_seed(0)
    x = torch.randn(sequence, batch, hidden, requires_grad=True)
    grad = torch.randn(sequence, batch, hidden)
    eager = layers_of(num_layers, hidden)
    one, two = (capture(copy.deepcopy(eager), (x,)) for _ in range(2))
    ways: dict[str, Callable[[], None]] = {
        "eager": lambda: eager(x).backward(grad),
        "graphs, one backward": lambda: one(x).backward(grad),
        "graphs, B and W": lambda: in_two(two, x, grad),
    }
    times = dict(zip(ways, in_turns(list(ways.values()), repeats, 3)))
    memory = {"eager": (saved_by_eager(eager, x), None), "graphs, one backward": (None, None)}
    memory["graphs, B and W"] = kept(two, x, grad)
    rows = []
    for way, values in times.items():
        saved, held = memory[way]
        rows.append(
            [
                f"{num_layers} layers, [{sequence * batch}, {hidden}]",
                way,
                f"{median_and_spread([1e3 * value for value in values], '{:.2f}')} ms",
                *(
                    median_and_spread([value / other for value, other in zip(values, times[base])])
                    for base in ("eager", "graphs, one backward")
                ),
                "" if saved is None else f"{saved / 2**20:.2f} MiB",
                "" if saved is None or held is None else f"{held / saved:.2f}",
            ]
        )
    return rows


def in_two(stage: nn.Module, x: Tensor, grad: Tensor) -> None:
    output, deferred = stage(x), DeferredGrads()
    with deferred:
        output.backward(grad)
    deferred.run()


def saved_by_eager(stage: nn.Module, x: Tensor) -> int:
    saved: dict[int, int] = {}
    weights = {weight.untyped_storage().data_ptr() for weight in stage.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stage(x)
    del output
    return sum(saved.values())


def kept(stage: nn.Module, x: Tensor, grad: Tensor) -> tuple[int, int]:
    """By the forward, and between B and W: its input counts, as it does in eager, its output does not."""
    deferred = DeferredGrads()
    before = [t for t in live_tensors() if t is not x]
    output = stage(x)
    saved = live_bytes(before) - output.nbytes
    with deferred:
        output.backward(grad)
    del output
    held = live_bytes(before) - x.nbytes
    deferred.run()
    return saved, held


def seconds_of(num_layers: int) -> float:
    start = time.perf_counter()
    capture(layers_of(num_layers, 32), (torch.randn(16, 1, 32, requires_grad=True),))
    return time.perf_counter() - start


if __name__ == "__main__":
    run(measure, 1, repeats=20)
