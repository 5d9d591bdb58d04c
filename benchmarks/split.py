"""What it costs to split the backward: B and W of megapipe's linear layers against one full backward.

    python -m benchmarks.split

Big layers show what it costs the arithmetic (nothing is to be computed twice), tiny ones what it costs the host.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from megapipe.weight_grad import DeferredGrads, convert, deferring

from .launching import be_undisturbed
from .tables import FOLDER, median_and_spread, save_table

HEADER = ["layers", "tokens", "device", "torch, full", "megapipe, full", "B", "W", "B + W", "(B + W) / torch"]
NOTES = "Medians of interleaved backwards, in brackets the middle half; gradients are added to those that are there."


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    be_undisturbed()
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    rows = []
    for device in devices:
        rows.append(compare(device, 2, 1024, 4096, args.tokens, args.repeats, "ms"))
        rows.append(compare(device, 16, 8, 8, 4, 20 * args.repeats, "us"))
    save_table("split", "Splitting the backward of linear layers", HEADER, rows, NOTES, args.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args()


def compare(device: str, num_layers: int, inner: int, outer: int, tokens: int, repeats: int, unit: str) -> list[str]:
    """Layers inner -> outer -> inner -> ..., with biases."""
    torch.manual_seed(0)
    widths = [inner if k % 2 == 0 else outer for k in range(num_layers + 1)]
    plain = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).to(device)
    ours = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(widths))).to(device)
    convert(ours)
    x = torch.randn(tokens, inner, device=device, requires_grad=True)
    grad = torch.randn(tokens, widths[-1], device=device)
    times: dict[str, list[float]] = {name: [] for name in ("torch", "full", "B", "W", "both")}
    for repeat in range(repeats + 3):
        output = plain(x)
        torch_time = timed(device, lambda output=output: output.backward(grad))  # type: ignore[misc]
        output = ours(x)
        full = timed(device, lambda output=output: output.backward(grad))  # type: ignore[misc]
        output, deferred = ours(x), DeferredGrads()
        inputs = timed(device, lambda output=output, deferred=deferred: split_backward(output, grad, deferred))  # type: ignore[misc]
        weights = timed(device, deferred.run)
        if repeat >= 3:
            for name, value in zip(times, (torch_time, full, inputs, weights, inputs + weights)):
                times[name].append(value)
    ratios = [both / whole for both, whole in zip(times["both"], times["torch"])]
    scale = {"ms": 1e3, "us": 1e6}[unit]
    form = "{:.1f}" if unit == "ms" else "{:.0f}"
    cells = [f"{median_and_spread([scale * one for one in values], form)} {unit}" for values in times.values()]
    return [f"{num_layers} of {inner} x {outer}", str(tokens), device, *cells, median_and_spread(ratios)]


def split_backward(output: Tensor, grad: Tensor, deferred: DeferredGrads) -> None:
    with deferring(deferred):
        output.backward(grad)


def timed(device: str, function: Callable[[], None]) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
