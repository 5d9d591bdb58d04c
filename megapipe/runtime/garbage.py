"""Python collects no garbage within a step: a pause of one rank is a pause of all.

Only cycles of references need the collector, and a step makes none of its own; but it counts objects, not cycles, and a
look at everything that torch has imported takes a tenth of a second, on one rank here and on another there. Between
steps it is as its owner has it.
"""

from __future__ import annotations

import gc
import os
import threading


class HeldBack:
    """A context in which Python collects nothing by itself. They overlap where several threads run steps, and the last
    to end lets it go on. Where it was disabled, it stays so."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_under_way = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._num_under_way:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._num_under_way += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_under_way -= 1
            if not self._num_under_way and self._was_enabled:
                gc.enable()

    def begin_child(self) -> None:
        """Let a process collect that is forked within a step, such as a worker that loads data: it never comes to the
        step's end."""
        if self._num_under_way and self._was_enabled:
            gc.enable()
        self.__init__()  # type: ignore[misc]  # also the lock: another thread may have held it


collection_held_back = HeldBack()
os.register_at_fork(after_in_child=collection_held_back.begin_child)
