"""The state that a backward under way consults, in one object behind one lock.

Autograd runs backward in threads of its own, which see no thread-local or context variable of the thread that asked for
it. So this is a plain object, and backwards that set it take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

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
        self.overlap_thread = 0
        """The thread on which that was begun."""
        self.num_stops = 0
        """How often forwards have stopped so far, for others to run meanwhile."""
        self.offered_forward: Any = None
        """The forward of a captured stage that the backward of another may run in its own graph (megapipe.graph)."""
        self.is_capturing = False
        """Whether a stage is being captured as a graph."""


backward_context = BackwardContext()
