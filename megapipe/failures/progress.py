"""Where a rank is in its step, as other ranks are told when something does not come."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["DeviceWaits", "Position"]


@dataclass(slots=True)
class Position:
    """Kept up to date by the rank's `Pipeline`."""

    step: int = 0
    """Its number in the session."""
    action: object = "the start of its step"
    """The action begun last, which prints like "2B1". None when the step has ended."""
    awaited: str | None = None
    """The message it waits for, like "the forward input of microbatch 3", if any."""
    peer: int | None = None
    """The pipeline rank that the message comes from."""


class _DeviceWait(NamedTuple):
    position: Position
    is_reached: Callable[[], bool]
    has_arrived: Callable[[], bool]


class DeviceWaits:
    """Messages that a device waits for, or will, after the host has gone on. May be used by several threads."""

    def __init__(self) -> None:
        self._waits: deque[_DeviceWait] = deque()
        self._lock = threading.Lock()

    def add(self, position: Position, is_reached: Callable[[], bool], has_arrived: Callable[[], bool]) -> None:
        """
        Args:
            is_reached: whether the device has come to this wait.
            has_arrived: whether the message is there.
        """
        self._waits.append(_DeviceWait(position, is_reached, has_arrived))

    def all_have_arrived(self) -> bool:
        with self._lock:
            while self._waits and self._waits[0].has_arrived():
                self._waits.popleft()
            return not self._waits

    def current(self) -> Position | None:
        """Where the device is, if it waits for a message."""
        if self.all_have_arrived():
            return None
        with self._lock:
            return self._waits[0].position if self._waits and self._waits[0].is_reached() else None
