"""The time until a fresh process has done its first step, with `megapipe.warm_up` before it and without.

    python -m benchmarks.first_step --pp 8

Stages are compiled when they first run. Once that is emulated: the first forward of a stage sleeps, and so does its
first backward, as if every rank had cores of its own. Once it is inductor, whose compilations share the cores of this
machine. Each case has processes of its own, and nothing is cached on the disk.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, PipelineStage, parallel_state, stages_for_rank, weight_grad
from megapipe.graph import capture

from .launching import launch, seconds
from .options import options
from .tables import save_table

SEQUENCE, BATCH, HIDDEN = 32, 2, 64
HEADER = "schedule | compiled by | warm_up | the warm-up, s | first step, s | both, s | second step, s"


def main() -> None:
    args = options(pp=8, microbatches=8, seconds=2.0, inductor=True)  # seconds of an emulated compilation
    slept = f"a sleep of {args.seconds:g} s each"
    cases = [("1f1b", slept), ("zbv", slept), *[("1f1b", "inductor")] * args.inductor]
    rows = []
    for schedule, compiler in cases:
        for is_warmed_up in (False, True):
            is_emulated = compiler != "inductor"
            times = launch(args.pp, measure, args, schedule, is_emulated, is_warmed_up, undisturbed=is_emulated)
            rows.append([schedule, compiler, "yes" if is_warmed_up else "no", *(f"{t:.2f}" for t in times)])
    notes = (
        f"Forward and backward of a stage are compiled apart, on {args.pp} ranks with a stage each (zbv: two). Seconds "
        "from the first rank's begin to the last one's end. The rows with a sleep say what is gained where ranks have "
        "cores of their own."
    )
    if args.inductor:
        notes += (
            " Inductor's compilations, and the import of inductor before them, take turns on the "
            f"{os.cpu_count()} cores of this machine."
        )
    title = f"Time to the first step, pp={args.pp}, m={args.microbatches}"
    save_table(f"first-step-pp{args.pp}-m{args.microbatches}", title, HEADER, rows, notes, args.folder)


class SlowAtFirst(nn.Module):
    """Sleeps where it would be compiled: in its first forward, and in its first backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer = make_layer()
        self._seconds = seconds
        self._compiled: set[str] = set()

    def forward(self, x: Tensor) -> Tensor:
        self._compile("forward")
        return InBackward.apply(self.layer(x), partial(self._compile, "backward"))  # type: ignore[no-any-return,no-untyped-call]

    def _compile(self, name: str) -> None:
        if name not in self._compiled:
            self._compiled.add(name)
            time.sleep(self._seconds)


def make_layer() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def measure(rank: int, args: argparse.Namespace, schedule: str, is_emulated: bool, is_warmed_up: bool) -> list[float]:
    """Seconds of the warm-up, of the first step, of both and of the second step."""
    parallel_state.initialize_model_parallel(args.pp)
    example = torch.zeros(SEQUENCE, BATCH, HIDDEN)
    chunks = []
    for info in stages_for_rank(schedule):
        torch.manual_seed(info.index)
        module: nn.Module = SlowAtFirst(args.seconds) if is_emulated else make_layer()
        weight_grad.convert(module)
        chunks.append(PipelineStage(module, info, PipelineConfig()))
        if not is_emulated:
            capture(chunks[-1], (example,), input_tensor=None if info.is_first else example, compile="inductor")
    train = megapipe.get_forward_backward_func(schedule)
    batch = [torch.randn(SEQUENCE, BATCH, HIDDEN) for _ in range(args.microbatches)]

    def step() -> None:
        train(forward_step, iter(batch), chunks, args.microbatches)

    def warm_up() -> None:
        megapipe.warm_up(train, forward_step, batch[0], chunks, args.microbatches, received=example)

    with tempfile.TemporaryDirectory() as cache:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache  # empty
        warmed_up = seconds(warm_up if is_warmed_up else lambda: None)
        first, second = seconds(step), seconds(step)
    return [warmed_up, first, warmed_up + first, second]


def forward_step(data_iterator: Iterator[Tensor], chunk: nn.Module) -> tuple[Any, Any]:
    return chunk(next(data_iterator)), lambda output: (output.square().mean(), {})


if __name__ == "__main__":
    main()
