"""Live storages: the bytes of tensors that are made while it watches, and still there.

The allocator of a CPU does not say what it does, and its profiler does not see what other threads free. A dispatch mode
sees each storage that an operation makes, and a weak reference its end, in whichever thread. It works on every device,
without memory (`meta`, torch's fake tensors) too.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_is_counted = True


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that counts the storages made in it, each once. What was there before does not count.

    Args:
        device: only those of such a device; None for all.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = None if device is None else device.type
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._gone: deque[int] = deque()  # appended to by any thread
        self._held = self._peak = 0

    @property
    def held(self) -> int:
        """The bytes that are there now."""
        while self._gone:
            self._held -= self._gone.popleft()
        return self._held

    @property
    def peak(self) -> int:
        """The most bytes since `restart`."""
        return max(self._peak, self.held)

    def restart(self) -> None:
        """Begin a new peak."""
        self._peak = self.held

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage()._cdata for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_iter(made):
            if not isinstance(tensor, Tensor) or not _is_counted or self._type not in (None, tensor.device.type):
                continue
            if (storage := tensor.untyped_storage())._cdata not in given:
                self._add(storage)
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if (alive := self._alive.get(key)) is not None and alive() is not None:
            return
        size, gone = storage.nbytes(), self._gone
        self._alive[key] = weakref.ref(storage, lambda _: gone.append(size))
        self._held += size
        self._peak = max(self._peak, self.held)


@contextmanager
def uncounted() -> Iterator[None]:
    """The context in which host memory is made: on a CPU it is of the same kind as the device's."""
    global _is_counted
    _is_counted = False
    try:
        yield
    finally:
        _is_counted = True
