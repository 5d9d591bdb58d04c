"""A forward of one stage and a backward of another, overlapped on one thread.

`forward_step_func` returns `in_segments(model, ...)`, and forward and backward run in each other's waits for
communication (megapipe.overlap).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..overlap import Segments, filling_windows
from .extension import ActionFunction
from .stage import Stage
from .unit import UnitState


class Forward(NamedTuple):
    """A forward that is to be run while a backward is."""

    stage: Stage
    unit: UnitState
    """Its input has arrived."""
    extra: tuple[bool, ...]
    done: Callable[[], None]
    """Called as soon as the output is held no more: else it is copied."""


def run_pair(
    forward: Forward, backward: Stage, run_backward: ActionFunction, unit: UnitState, fill: Callable[[UnitState], None]
) -> None:
    """Run a forward and B of a unit in segments.

    A forward that `forward_step_func` has run by itself is not overlapped.

    Args:
        run_backward: the B of that stage.
        fill: called with a unit in those of its windows in which the other does not run.
    """
    stage = forward.stage
    with filling_windows(lambda: fill(forward.unit)):
        output, loss_func = stage.start_forward(forward.unit, *forward.extra)

    def finish() -> None:
        nonlocal output
        returned, output = output, None
        stage.finish_forward(forward.unit, returned, loss_func)
        del returned
        forward.done()

    if not isinstance(output, Segments):
        finish()

    def advance() -> None:
        if output is None:
            fill(unit)
            return
        stage.show(forward.unit)
        if not output.advance():
            with torch.enable_grad():  # this may be inside of the backward
                finish()
        if stage is backward and unit.received is not None:
            stage.show(unit)

    # The forward begins in the backward's first window, so one computes whenever the other's data is on its way.
    with filling_windows(advance):
        run_backward(unit)
    while output is not None:
        advance()
