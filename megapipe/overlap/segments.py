"""A forward that can be interrupted where it waits for a communication: a generator, run segment by segment."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from ..activations import autocasts
from ..weight_grad import backward_context
from .windows import fill_window

Result = TypeVar("Result")


def run_segments(segments: Generator[None, None, Result]) -> Result:
    """Run a generator to its end and return its result. Makes `forward` out of `forward_segments`."""
    while True:
        try:
            next(segments)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def in_segments(module: nn.Module, *args: Any, **kwargs: Any) -> Segments:
    """The call `module(*args, **kwargs)`, to be run segment by segment.

    A `forward_step_func` returns it as its output, to let the schedule overlap this forward with a backward:

        return in_segments(model, x), loss_func

    And modules use it for those inside them, in `forward_segments`:

        x = yield from in_segments(layer, x)

    Segments are those of the module's `forward_segments`, a generator method with the arguments and the result of
    `forward`, which yields before each wait for a communication. The module, or one inside its wrappers (`.module`, and
    no other parts), defines it; the forwards of such wrappers are skipped. A module without it is called as a whole.
    So is one with forward hooks, since they belong around a call, one whose forward has been replaced, by a subclass or
    as an attribute, and one in DistributedDataParallel.
    """
    return Segments(module, args, kwargs)


class Segments:
    """The call of a module under way. See `in_segments`.

    It begins with gradients and autocast as they were when it was made, and goes on as they were where it yielded:
    contexts around a yield are its own. On an accelerator autograd calls the callback of an overlap window in a thread
    of its own, which has neither.
    """

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.has_stopped = False
        """Whether it has yielded."""
        self._segments = _call(module, args, kwargs)
        self._keep_modes()
        self._is_done = False
        self._result: Any = None

    def __iter__(self) -> Generator[None, None, Any]:
        return self._segments

    def advance(self) -> bool:
        """Run to the next yield. False once the forward is done."""
        if self._is_done:
            return False
        with ExitStack() as around:
            around.enter_context(torch.set_grad_enabled(self._records_gradients))
            for autocast in self._autocasts:
                around.enter_context(autocast())
            try:
                next(self._segments)
                self._keep_modes()
                self.has_stopped = True
                backward_context.num_stops += 1
            except StopIteration as end:
                self._is_done, self._result = True, end.value
        return not self._is_done

    def _keep_modes(self) -> None:
        self._records_gradients, self._autocasts = torch.is_grad_enabled(), autocasts(_devices())

    def finish(self) -> Any:
        """Run the remaining segments, and fill the windows between them. Returns the forward's result."""
        while self.advance():
            fill_window()
        return self._result


def _call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Generator[None, None, Any]:
    forward_segments = find_forward_segments(module)
    if forward_segments is None:
        return module(*args, **kwargs)
    return (yield from forward_segments(*args, **kwargs))


@functools.cache
def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def find_forward_segments(module: Any) -> Callable[..., Generator[None, None, Any]] | None:
    """The `forward_segments` of a module, or of one that torch.compile has wrapped; None if it is to be called as a
    whole: the forward of any other wrapper may do more than to call the module in it."""
    compiled = getattr(module, "_modules", {}).get("_orig_mod")
    if compiled is not None and not _has_hooks(module):
        module = compiled
    forward_segments = getattr(module, "forward_segments", None)
    if forward_segments is None or _has_hooks(module) or "forward" in vars(module):
        return None
    return forward_segments if _are_of_forward(type(module)) else None


def _are_of_forward(kind: type) -> bool:
    """Whether the segments are those of its forward, and not of one that a subclass has replaced."""
    return next(("forward_segments" in vars(one) for one in kind.__mro__ if _defines(one)), True)


def _defines(kind: type) -> bool:
    return not {"forward", "forward_segments"}.isdisjoint(vars(kind))


def _has_hooks(module: Any) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)
