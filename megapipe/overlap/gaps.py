"""The gap between the start of a communication in a backward and the wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..weight_grad import backward_context

__all__ = ["fill_gap", "filling_gaps"]


@contextmanager
def filling_gaps(advance: Callable[[], object]) -> Iterator[None]:
    """Around one backward: `advance` is called in each of its gaps."""
    with backward_context.lock:
        before, backward_context.overlap_callback = backward_context.overlap_callback, advance
        try:
            yield
        finally:
            backward_context.overlap_callback = before


def fill_gap() -> None:
    """What is run in a gap may have a backward in it, whose gaps are not for itself to fill."""
    callback, backward_context.overlap_callback = backward_context.overlap_callback, None
    if callback is None:
        return
    try:
        callback()
    finally:
        backward_context.overlap_callback = callback
