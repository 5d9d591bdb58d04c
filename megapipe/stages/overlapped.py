"""A forward of one stage and a backward of another, overlapped on one thread.

`forward_step_func` returns `in_segments(model, ...)`, and forward and backward run in each other's waits for
communication (megapipe.overlap).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from ..overlap import Segments, filling_windows
from .extension import ActionFunction
from .stage import Stage
from .unit import UnitState


class Half(NamedTuple):
    """The forward or the backward of a pair."""

    stage: Stage
    run: ActionFunction
    """The function of the action, with what options put around it."""
    unit: UnitState
    """The message that the action needs has arrived already."""


def run_overlapped(
    forward: Half, extra: tuple[bool, ...], done: Callable[[], None], backward: Half, fill: Callable[[UnitState], None]
) -> None:
    """Run a forward in segments, in the overlap windows of a backward of another unit.

    If `forward_step_func` has run the whole forward at once, the two run one after the other.

    Args:
        extra: further arguments of the forward.
        done: called at the end of the forward, when nothing else holds the output: then it is sent without a copy.
        fill: called with a unit in its windows in which the other action has nothing to run.
    """
    stage, unit = forward.stage, forward.unit
    unit.parts = _parts(stage, unit, extra, done)

    def advance() -> None:
        if unit.parts is None:
            fill(backward.unit)
            return
        forward.run(unit, *extra)
        if stage is backward.stage and backward.unit.received is not None:
            stage.give_input(backward.unit)

    with filling_windows(lambda: fill(unit)):
        advance()
    # The forward goes on in the backward's first window, so one computes whenever the other's data is on its way.
    with filling_windows(advance):
        backward.run(backward.unit)
    while unit.parts is not None:
        advance()


def _parts(stage: Stage, unit: UnitState, extra: tuple[bool, ...], done: Callable[[], None]) -> Iterator[None]:
    """Runs a forward, one part after the other: up to its first segment, and each of these."""
    output, loss_func = stage.start_forward(unit, *extra)
    is_under_way = isinstance(output, Segments)
    while is_under_way:
        yield
        stage.give_input(unit)
        is_under_way = output.advance()
    with torch.enable_grad():  # this may be inside of the backward
        stage.finish_forward(unit, output, loss_func)
    del output, loss_func
    unit.parts = None
    done()
