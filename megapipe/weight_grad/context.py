"""The state that a backward under way consults, in one object behind one lock.

Autograd runs backward in threads of its own, which see no thread-local or context variable of the thread that asked for
it. So this is a plain object, and backwards that set it take turns.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class BackwardContext:
    """Change it while holding `lock`, or from within the backward that holds it, on whatever thread that runs."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.deferred: Any = None
        """The `DeferredGrads` that take the weight gradients; None where they are computed at once."""
        self.dummy_grads: dict[Tensor, Tensor] | None = None
        """Zeros that take the place of `.grad` until the backward ends. None outside of a backward."""
        self.outer: list[tuple[Any, dict[Tensor, Tensor] | None]] = []
        """Both, of the backwards around this one."""
        self.overlap_callback: Callable[[], object] | None = None
        """Called in each overlap window of the action under way (megapipe.overlap)."""
        self.overlap_thread: Any = None
        """`this_thread()` of the one on which that was begun."""
        self.num_stops = 0
        """How often forwards have stopped so far, for others to run meanwhile."""
        self.offered_forward: Any = None
        """The forward of a captured stage that the backward of another may run in its own graph (megapipe.graph)."""
        self.is_capturing = False
        """Whether a stage is being captured as a graph."""


backward_context = BackwardContext()


class Thread:
    """What is under way on a thread, and on autograd's threads that run backwards for it."""

    deferred: Any = None
    """The `DeferredGrads` whose B it is."""
    slice: Any = None
    """The slice of a sequence that is computed (megapipe.slices)."""


def this_thread() -> Thread:
    """An object that torch keeps for a thread. Torch's own thread-locals go along to the threads that run backward."""
    if not torch._C._is_key_in_tls(_KEY):
        made = Thread()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # torch before 2.13 or so does not count its reference
        torch._C._stash_obj_in_tls(_KEY, made)
    return torch._C._get_obj_in_tls(_KEY)  # type: ignore[no-any-return]


_KEY = "megapipe.weight_grad"
