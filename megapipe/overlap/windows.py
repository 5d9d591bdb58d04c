"""The overlap window: the time between the start of a communication in a forward or backward and the wait for it.

Each wait for one of torch's functional collectives is a window, too, wherever in a model it is: all those of DTensors,
which `parallelize_module` makes. Torch has no hook there, so its function is replaced while an action runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed import _functional_collectives as functional

from ..weight_grad import backward_context, this_thread


class filling_windows:  # noqa: N801  # a context; a generator would take longer, around each action
    """The context of one action: call `callback` in each of its overlap windows.

    Args:
        callback: called without arguments, on the thread that runs the action.
    """

    def __init__(self, callback: Callable[[], object]) -> None:
        self._callback = callback

    def __enter__(self) -> None:
        context = backward_context
        context.lock.acquire()
        self._before = context.overlap_callback, context.overlap_thread, functional.wait_tensor
        context.overlap_callback, context.overlap_thread = self._callback, this_thread()
        functional.wait_tensor = wait_in_window

    def __exit__(self, *error: object) -> None:
        context = backward_context
        context.overlap_callback, context.overlap_thread, functional.wait_tensor = self._before
        context.lock.release()


def fill_window() -> None:
    """Call the callback of the action that is running, if it has one. Called in the backward of an autograd Function
    that has started a communication, just before it waits for it.

    An action that the callback itself runs has no windows.
    """
    callback, backward_context.overlap_callback = backward_context.overlap_callback, None
    if callback is None:
        return
    try:
        callback()
    finally:
        backward_context.overlap_callback = callback


_original = functional.wait_tensor


def wait_in_window(tensor: Tensor) -> Any:
    """Torch's `wait_tensor`, after the window is filled."""
    # Not for threads with other things to do, such as reductions of gradients or backwards of their own.
    if this_thread() is backward_context.overlap_thread and not functional._are_we_tracing():
        fill_window()
    return _original(tensor)  # type: ignore[no-untyped-call]
