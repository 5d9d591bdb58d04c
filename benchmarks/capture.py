"""What captured stages cost and gain.

    python -m benchmarks.capture

Two tables: the time and memory of a backward in two against one and against eager; how long a capture takes, and how
large it is.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from megapipe.graph import capture, partition, split_di_dw, trace_joint
from megapipe.weight_grad import DeferredGrads

from .launching import in_turns, launch
from .memory import live_bytes, live_tensors
from .options import options
from .tables import median_and_spread, save_table

NUM_HEADS = 4


def main() -> None:
    args = options(repeats=20)
    split, sizes = launch(1, measure, args)
    header = "a stage of | how | F + B + W | against eager | against one backward | saved | held from B to W"
    notes = (
        "Transformer layers of [tokens, hidden] tensors. Medians of interleaved runs, in brackets the middle half; the "
        "ratios are taken run by run. *saved*: what the forward keeps, without weights. *held*: what W keeps of it and "
        "of B's, against *saved*. Gradients are added to those that are there."
    )
    save_table("capture-split", "A captured stage's backward in two", header, split, notes, args.folder)
    header = "layers | capture | operators in F | in the backward | in B and W | weight gradients left to W"
    notes = "Transformer layers; the capture without the time of the first import of the tracer."
    save_table("capture-size", "What a capture takes", header, sizes, notes, args.folder)


def measure(rank: int, args: argparse.Namespace) -> tuple[list[list[str]], list[list[str]]]:
    """Both tables."""
    shapes = ((2, 256, 4, 128), (4, 32, 1, 16))
    split = [row for shape in shapes for row in backward_in_two(*shape, args.repeats)]
    return split, [capture_of(num_layers) for num_layers in (2, 8, 24)]


class Layer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).view(*x.shape[:2], 3, NUM_HEADS, -1)
        mixed = F.scaled_dot_product_attention(*heads.permute(2, 1, 3, 0, 4), is_causal=True)
        x = x + self.proj(mixed.permute(2, 0, 1, 3).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


def backward_in_two(num_layers: int, hidden: int, batch: int, sequence: int, repeats: int) -> list[list[str]]:
    torch.manual_seed(0)
    x = torch.randn(sequence, batch, hidden, requires_grad=True)
    grad = torch.randn(sequence, batch, hidden)
    eager = nn.Sequential(*(Layer(hidden) for _ in range(num_layers)))
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


def capture_of(num_layers: int) -> list[str]:
    stage = nn.Sequential(*(Layer(32) for _ in range(num_layers)))
    weights, x = list(stage.parameters()), torch.randn(16, 1, 32, requires_grad=True)
    names = [name for name, _ in stage.named_parameters()]

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        return (torch.func.functional_call(stage, dict(zip(names, tensors)), tensors[-1:]),)

    start = time.perf_counter()
    parts = partition(trace_joint(function, [*weights, x], "the stage"))
    split = split_di_dw(parts.backward, range(len(weights)))
    seconds = time.perf_counter() - start
    sizes = [size_of(parts.forward), size_of(parts.backward)]
    sizes.append(size_of(split.input_gradients) + sum(size_of(weight.graph) for weight in split.weights))
    return [str(num_layers), f"{seconds:.2f} s", *map(str, sizes), str(len(split.weights))]


def size_of(graph: GraphModule) -> int:
    return sum(node.op == "call_function" for node in graph.graph.nodes)


if __name__ == "__main__":
    main()
