"""A forward that stops wherever it is about to wait for a communication: a generator."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn

from ..chunks import iter_wrapped

__all__ = ["Parts", "find_forward_parts", "in_parts", "run_parts"]

Result = TypeVar("Result")


def run_parts(parts: Generator[None, None, Result]) -> Result:
    """Run a forward in parts to its end, without a stop. Makes `forward` out of `forward_parts`."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


def in_parts(module: nn.Module, *args: Any, **kwargs: Any) -> Generator[None, None, Any]:
    """The call of a module, in parts if it can be: `x = yield from in_parts(layer, x)` in another's `forward_parts`.

    That is where it, or what is inside its wrappers (`.module`), defines `forward_parts`, a generator with the
    arguments and the result of `forward`; the forwards of such wrappers are passed by. A module with forward hooks is
    called as a whole, since they belong around a call.
    """
    forward_parts = find_forward_parts(module)
    if forward_parts is None:
        return module(*args, **kwargs)
    return (yield from forward_parts(*args, **kwargs))


class Parts:
    """A forward under way, run part by part, with gradients and autocast as they were when this was made.

    On an accelerator autograd calls the gap in a thread of its own, where neither would be so.
    """

    def __init__(self, parts: Generator[None, None, Any]) -> None:
        self._parts = parts
        self._records_gradients = torch.is_grad_enabled()
        device_types = {"cpu"}
        if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
            device_types.add(accelerator.type)
        self._autocasts = [
            (device_type, torch.get_autocast_dtype(device_type), torch.is_autocast_enabled(device_type))
            for device_type in device_types
            if torch.amp.is_autocast_available(device_type)
        ]
        self._is_done = False
        self._result: Any = None

    def advance(self) -> bool:
        """Run to the next yield. False once the forward is done."""
        if self._is_done:
            return False
        with ExitStack() as around:
            around.enter_context(torch.set_grad_enabled(self._records_gradients))
            for device_type, dtype, is_enabled in self._autocasts:
                around.enter_context(torch.autocast(device_type, dtype, is_enabled))
            try:
                next(self._parts)
            except StopIteration as end:
                self._is_done, self._result = True, end.value
        return not self._is_done

    def finish(self) -> Any:
        """Run what is left. Returns the forward's result."""
        while self.advance():
            pass
        return self._result


def find_forward_parts(module: Any) -> Callable[..., Generator[None, None, Any]] | None:
    for inner in iter_wrapped(module):
        # DistributedDataParallel's forward prepares the reduction of the gradients.
        if _has_hooks(inner) or isinstance(inner, nn.parallel.DistributedDataParallel):
            return None
        forward_parts = getattr(inner, "forward_parts", None)
        if forward_parts is not None:
            return forward_parts  # type: ignore[no-any-return]
    return None


def _has_hooks(module: Any) -> bool:
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, name, None) for name in hooks)
