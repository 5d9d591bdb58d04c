"""What it costs to split the backward: B and W of megapipe's linear layers against one full backward.

    python -m benchmarks.split

Big layers show what it costs the arithmetic (nothing is to be computed twice), tiny ones what it costs the host.
"""

from __future__ import annotations

import argparse
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn

from megapipe.weight_grad import DeferredGrads, convert

from .launching import in_turns
from .options import run
from .tables import Table, median_and_spread

HEADER = "layers | tokens | torch, full | megapipe, full | B | W | B + W | (B + W) / torch"
NOTES = "Medians of interleaved backwards, in brackets the middle half; gradients are added to those that are there."


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    rows = [compare(2, 1024, 4096, args.tokens, args.repeats, "ms"), compare(16, 8, 8, 4, 20 * args.repeats, "us")]
    return [("split", "Splitting the backward of linear layers", HEADER, rows, NOTES)]


def compare(num_layers: int, inner: int, outer: int, tokens: int, repeats: int, unit: str) -> list[str]:
    """Layers inner -> outer -> inner -> ..., with biases."""
    torch.manual_seed(0)
    widths = [inner if k % 2 == 0 else outer for k in range(num_layers + 1)]
    plain = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths)))
    ours = convert(nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))))
    x = torch.randn(tokens, inner, requires_grad=True)
    grad = torch.randn(tokens, widths[-1])
    times: list[list[float]] = []
    for _ in range(repeats + 3):
        outputs, deferred = [plain(x), ours(x), ours(x)], DeferredGrads()
        both = [lambda: split_backward(outputs[2], grad, deferred), deferred.run]  # noqa: B023
        passes = [*(partial(output.backward, grad) for output in outputs[:2]), *both]
        times.append([one for (one,) in in_turns(passes, 1, 0)])
    full, own, inputs, weights = zip(*times[3:])
    together = [b + w for b, w in zip(inputs, weights)]
    ratios = [both / whole for both, whole in zip(together, full)]
    scale, form = {"ms": (1e3, "{:.1f}"), "us": (1e6, "{:.0f}")}[unit]
    columns = [[scale * one for one in column] for column in (full, own, inputs, weights, together)]
    cells = [f"{median_and_spread(column, form)} {unit}" for column in columns]
    return [f"{num_layers} of {inner} x {outer}", str(tokens), *cells, median_and_spread(ratios)]


def split_backward(output: Tensor, grad: Tensor, deferred: DeferredGrads) -> None:
    with deferred:
        output.backward(grad)


if __name__ == "__main__":
    run(measure, 1, tokens=256, repeats=25)
