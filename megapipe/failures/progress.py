"""Where a rank is in its step. Other ranks are told when a message does not come."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Progress:
    """Written by the main thread, read by the watchdog."""

    step: int = 0
    """How many steps have begun."""
    action: object = None
    """The action begun last, which prints like "2B1". None outside a step."""
    awaited: str | None = None
    """The message it waits for, like "the forward input of microbatch 3", if any."""
    peer: int | None = None
    """The pipeline rank that the message comes from."""

    def as_json(self) -> str:
        action = None if self.action is None else str(self.action)
        return json.dumps({**asdict(self), "action": action})


def report(everybody: Sequence[Progress | None], have_begun: Sequence[bool]) -> str:
    """Where every rank of a pipeline is.

    Args:
        everybody: by rank, None for one that has not told.
        have_begun: by rank, whether it was ever in a step.
    """
    places = [_place(*one) for one in zip(everybody, have_begun)]
    lines = []
    for rank, one in enumerate(everybody):
        if one is None or one.awaited is None:
            lines.append(f"rank {rank} is {places[rank]}")
        elif one.peer is None:
            lines.append(f"rank {rank} waits for {one.awaited}")
        else:
            lines.append(f"rank {rank} waits for {one.awaited} from rank {one.peer}, which is {places[one.peer]}")
    is_outside = any("any step" in place for place in places)
    question = " Does every rank call the schedule equally often?" if is_outside else ""
    return "; ".join(lines) + "." + question


def _place(progress: Progress | None, has_begun: bool) -> str:
    if progress is None:
        # A living process would have told, whatever its main thread does.
        silent = "silent: its process ended without a word (killed, or out of memory?), or stands still"
        return silent if has_begun else "still to begin any step"
    if progress.action is None:
        return f"outside any step, after {progress.step} of them"
    return f"at {progress.action}"


class _DeviceWait(NamedTuple):
    progress: Progress
    is_reached: Callable[[], bool]
    is_over: Callable[[], bool]


class DeviceWaits:
    """Messages that a device waits for, or will, after the host has gone on. May be used by several threads.

    Only events are kept of them, not the messages: their memory is the step's business.
    """

    PATIENCE = 0.1
    """Seconds that a device has to tell where it is."""

    def __init__(self) -> None:
        self._waits: deque[_DeviceWait] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._asked, self._answered = threading.Event(), threading.Event()
        self._answer: Progress | None = None

    def add(self, progress: Progress, is_reached: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """
        Args:
            progress: a copy, as of this wait.
            is_reached: whether the device has come to this wait.
            is_over: whether it has come past it.
        """
        self._waits.append(_DeviceWait(progress, is_reached, is_over))
        if self._thread is None:
            self._thread = threading.Thread(target=self._answer_all, name="megapipe-events", daemon=True)
            self._thread.start()

    def are_over(self) -> bool:
        with self._lock:
            while self._waits and self._waits[0].is_over():
                self._waits.popleft()
            return not self._waits

    def current(self) -> Progress | None:
        """The place of the device, if it waits for a message. While a thread waits for the whole device, CUDA may let
        everybody else wait who asks for an event: where no answer comes, the oldest message is taken for what the
        device waits for."""
        if not self._waits:
            return None
        self._answered.clear()
        self._asked.set()
        if self._answered.wait(self.PATIENCE):
            return self._answer
        with suppress(IndexError):
            return self._waits[0].progress
        return None

    def close(self) -> None:
        self._is_closed = True
        self._asked.set()

    def _answer_all(self) -> None:
        """Runs in a thread of its own: a question may have no answer for as long as the main thread waits."""
        while True:
            self._asked.wait()
            self._asked.clear()
            if self._is_closed:
                return
            if self.are_over():
                self._answer = None
            else:
                with self._lock:
                    self._answer = self._waits[0].progress if self._waits and self._waits[0].is_reached() else None
            self._answered.set()
