"""The overlap window: the time between the start of a communication in a forward or backward and the wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..weight_grad import backward_context

__all__ = ["fill_window", "filling_windows"]


@contextmanager
def filling_windows(callback: Callable[[], object]) -> Iterator[None]:
    """Around one action: call `callback` in each of its overlap windows.

    Args:
        callback: called without arguments, on the thread that runs the action.
    """
    with backward_context.lock:
        before, backward_context.overlap_callback = backward_context.overlap_callback, callback
        try:
            yield
        finally:
            backward_context.overlap_callback = before


def fill_window() -> None:
    """Call the callback of the action under way, if it has one. For the backward of an autograd Function that has
    started a communication and is about to wait for it.

    An action that the callback runs itself has no windows.
    """
    callback, backward_context.overlap_callback = backward_context.overlap_callback, None
    if callback is None:
        return
    try:
        callback()
    finally:
        backward_context.overlap_callback = callback
