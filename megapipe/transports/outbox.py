"""Sends under way from a host: helper threads start them, wait for them, and free their tensors.

Gloo copies a message to the peer's socket in the thread that sends it, and only a blocking wait tells that a send has
completed. So one thread starts large sends, and another waits for all sends. While they copy or wait they do not hold
the interpreter.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from ..p2p_communication import Transfer

__all__ = ["Outbox", "TaskThread"]


class TaskThread:
    """Runs tasks one after the other, and drops each once it has run."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, task: Callable[[], object]) -> None:
        self._queue.put(task)

    def drain(self) -> None:
        """Wait until all tasks have run. Raises the first error of a task."""
        drained = threading.Event()
        self._queue.put(drained.set)
        drained.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread after the tasks put so far."""
        self._queue.put(None)

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except Exception as error:
                self._error = self._error or error
            del task  # no sent tensor may stay alive while this waits for the next one


class Outbox:
    """The sends of all channels of one transport, in the order in which they are handed over."""

    MIN_THREAD_BYTES = 2**20
    """Size of a message from which on a thread starts it: 1.4 ms for 4 MB. Smaller ones the caller starts itself, as
    handing them over would take longer."""

    def __init__(self) -> None:
        self._starts = TaskThread("megapipe-sends")
        self._waits = TaskThread("megapipe-sends")
        self._num_handed_over = 0
        self._num_started = 0  # of these

    def send(self, start: Callable[[], Transfer], num_bytes: int) -> None:
        """
        Args:
            start: starts the send of one message, without waiting.
        """
        if num_bytes < self.MIN_THREAD_BYTES and self._num_started == self._num_handed_over:  # it overtakes no other
            self._waits.put(start().wait)
        else:
            self.hand_over(start)

    def hand_over(self, start: Callable[[], Transfer]) -> None:
        """Let the thread call `start`, which may wait before it sends."""

        def task() -> None:
            try:
                self._waits.put(start().wait)
            finally:
                self._num_started += 1

        self._num_handed_over += 1
        self._starts.put(task)

    def drain(self) -> None:
        """Wait until all sends have completed. Raises the error of the first that failed."""
        self._starts.drain()
        self._waits.drain()

    def close(self) -> None:
        self._starts.put(self._waits.close)
        self._starts.close()
