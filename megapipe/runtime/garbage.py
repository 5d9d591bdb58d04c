"""When Python collects garbage: between steps, on all ranks alike. A pause of one rank is a pause of all.

Only cycles of references need the collector, and a step makes none of its own; but it counts objects, not cycles, and a
look at everything that torch has imported takes a tenth of a second, on one rank here and on another there.
"""

from __future__ import annotations

import atexit
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

OF_PYTHON = 10_000
"""More objects than Python freezes by itself, and less than a user does: 3.12 freezes its immortal ones, some hundreds,
in each collection, and whoever has imported torch has a hundred thousand."""


class Collector:
    """Python's, which all pipelines of a process share. Its thresholds are left alone, and where the user has disabled
    it, it stays so, and nothing is collected here either."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0  # steps, of several pipelines or within each other
        self._num_done = 0
        self._was_enabled = False
        self._known: WeakSet[Any] = WeakSet()  # the models
        self._has_frozen = False
        self._has_user_frozen = False  # looked for until it is found: counting what is frozen takes tens of ms

    @contextmanager
    def between_steps(self, interval: int | None, models: Sequence[Any]) -> Iterator[None]:
        """Around one step: no collection within it; one behind the first of a model and every `interval` steps. Ranks
        that run the same steps need not talk about it.

        What is frozen is looked at again ahead of the first step of another model: the one before may be garbage, in
        cycles, with all its weights.

        Args:
            interval: None leaves everything to Python.
        """
        if interval is None:
            yield
            return
        with self._lock:
            if not self._num_under_way:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_under_way += 1
            is_first = not self._known.issuperset(models)
            self._known.update(models)
        if is_first and self._has_frozen:
            self._has_frozen = False
            gc.unfreeze()
            gc.collect()
        try:
            yield
        finally:
            is_between = self._end_step()
        if is_between and (is_first or self._num_done % interval == 0):
            gc.collect()
            if is_first and not (self._has_frozen or self._has_user_frozen):
                self._has_user_frozen = gc.get_freeze_count() > OF_PYTHON
                if not self._has_user_frozen:
                    gc.freeze()  # what was imported and built is not looked at again
                    atexit.register(gc.unfreeze)  # or at exit extension modules find leaks in it
                    self._has_frozen = True

    def _end_step(self) -> bool:
        """Returns whether no step is under way any more, and it is ours to collect."""
        with self._lock:
            self._num_under_way -= 1
            if self._num_under_way or not self._was_enabled:
                return False
            self._num_done += 1
            gc.enable()
            return True


collector = Collector()
