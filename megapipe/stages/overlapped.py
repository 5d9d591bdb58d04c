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
    """Its input has arrived already."""
    extra: tuple[bool, ...]
    done: Callable[[], None]
    """Called at the end of the forward, when nothing else holds the output: then it is sent without a copy."""


def run_overlapped(
    forward: Forward, backward: Stage, run_backward: ActionFunction, unit: UnitState, fill: Callable[[UnitState], None]
) -> None:
    """Run a forward in segments, in the overlap windows of a backward of another unit.

    If `forward_step_func` has run the whole forward at once, the two run one after the other.

    Args:
        backward: the stage of the backward.
        run_backward: the function of its B.
        unit: the unit that goes backward.
        fill: called with a unit in its windows in which the other action has nothing to run.
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
