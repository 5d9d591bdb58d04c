"""Sends under way from a host: helper threads start them, wait for them, and free their tensors.

Gloo copies a message to the peer's socket in the thread that sends it, and only a blocking wait tells that a send has
completed. So one thread starts large sends, and another waits for sends. While they copy or wait they do not hold the
interpreter. But each time they wake up they take a core away from those that compute: so small messages, which the
caller starts itself, are waited for many at a time.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..p2p_communication import ConnectionLostError, Transfer


class TaskThread:
    """Runs tasks one after the other, and drops each once it has run."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._is_drained = True
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, task: Callable[[], object]) -> None:
        self._is_drained = False
        self._queue.put(task)

    def drain(self) -> None:
        """Wait until all tasks have run that were put before. Raises the first error of a task."""
        if not self._is_drained:
            drained = threading.Event()
            self._queue.put(drained.set)
            drained.wait()
            self._is_drained = True
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
    handing them over would take longer. When so many bytes of these are under way, a thread waits for them."""

    def __init__(self) -> None:
        self._starts = TaskThread("megapipe-sends")
        self._waits = TaskThread("megapipe-sends")
        self._num_handed_over = 0
        self._num_started = 0  # of these
        self._under_way: list[torch.Tensor] = []  # small ones, that are not waited for yet
        self._works: list[Any] = []  # of these
        self._num_bytes = 0

    def send(self, backend: Any, peer: int, tag: int, tensors: list[torch.Tensor]) -> None:
        """Send a message over a backend of torch.distributed, without waiting."""
        num_bytes = 0
        for tensor in tensors:
            num_bytes += tensor.nbytes
        if num_bytes >= self.MIN_THREAD_BYTES or self._num_started < self._num_handed_over:  # it overtakes no other
            self.hand_over(partial(_start, backend, peer, tag, tensors))
            return
        for tensor in tensors:
            self._works.append(backend.send([tensor], peer, tag))
            self._under_way.append(tensor)
        self._num_bytes += num_bytes
        if self._num_bytes >= self.MIN_THREAD_BYTES:
            self._waits.put(self._small_ones().wait)

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
        """Wait until all sends have completed. Raises the error of one that failed."""
        self._starts.drain()
        self._waits.drain()
        self._small_ones().wait()

    def _small_ones(self) -> Transfer:
        """Those under way, as one: they are freed together."""
        small_ones = Transfer(None, self._under_way, self._works)
        self._under_way, self._works, self._num_bytes = [], [], 0
        return small_ones

    def close(self) -> None:
        self._starts.put(self._waits.close)
        self._starts.close()


def _start(backend: Any, peer: int, tag: int, tensors: list[torch.Tensor]) -> Transfer:
    """A send under way. The transfer must be kept until it has completed, or gloo loses the message."""
    try:
        return Transfer(None, tensors, [backend.send([tensor], peer, tag) for tensor in tensors])
    except RuntimeError as error:
        raise ConnectionLostError.of(error) from error
