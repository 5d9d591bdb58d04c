"""A stand-in for ProcessGroupNCCL on the asynchronous device, with NCCL's constraints.

- A communicator runs its operations one after the other, on a stream of its own, each behind what the compute stream
  had when it was called. It pairs messages by their order alone.
- A receive occupies the device from the moment it runs until its message has come; so does a send larger than the
  transport's buffers. `OCCUPIED` counts both, and `MOST_OCCUPIED` the most there were at a time.
- It carries the types of numbers that NCCL knows.
- To abort a communicator frees memory, which waits for the device: while another one occupies it, and is not being
  aborted too, it does not return.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from fakes.lazy_device import COMPUTE, Stream

from megapipe.transports.nccl import CARRIED

BUFFERED_BYTES = 2**20
NUM_STREAMS = 32
"""Streams of one priority: the next one is the first again."""

COMMUNICATORS: list[LikeNccl] = []
_lock = threading.Lock()
OCCUPIED: set[LikeNccl] = set()
MOST_OCCUPIED = 0


class Options:
    """What NcclTransport may set. A name that is not here is an error."""

    __slots__ = ("_timeout", "config", "global_ranks_in_group", "group_name", "is_high_priority_stream")

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config = type("Config", (), {"max_ctas": 32})()


class Work:
    def __init__(self) -> None:
        self.is_done = threading.Event()

    def is_completed(self) -> bool:
        return self.is_done.is_set()

    def wait(self) -> None:
        """The compute stream waits, not the host."""
        COMPUTE.put(self.is_done.wait)


class LikeNccl:
    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        assert size == 2
        assert options.group_name
        assert len(options.global_ranks_in_group) == 2
        self.options = options
        self._wire = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=60))
        self._stream = Stream()
        self._is_aborted = threading.Event()
        COMMUNICATORS.append(self)
        assert len(COMMUNICATORS) <= NUM_STREAMS, "two communicators share a stream"

    def send(self, tensors: list[Any], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        assert tensor.dtype in CARRIED
        cell = tensor.cell
        is_large = tensor.nbytes > BUFFERED_BYTES

        def run() -> None:
            sent = self._wire.send([cell.cpu.contiguous()], peer, 0)
            if is_large:
                self._occupy(sent)
            else:
                threading.Thread(target=sent.wait, daemon=True).start()

        return self._enqueue(run)

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        assert tensor.dtype in CARRIED
        cell = tensor.cell

        def run() -> None:
            if cell.cpu.is_floating_point():
                cell.cpu.fill_(float("nan"))
            buffer = torch.empty_like(cell.cpu)
            self._occupy(self._wire.recv([buffer], peer, 0))
            cell.cpu.copy_(buffer)

        return self._enqueue(run)

    def _enqueue(self, run: Any) -> Work:
        work, ready = Work(), COMPUTE.record()

        def operation() -> None:
            ready.wait()
            try:
                if not self._is_aborted.is_set():
                    run()
            finally:
                work.is_done.set()  # after an abort too: the device goes on with what is in the buffer

        self._stream.put(operation)
        return work

    def _occupy(self, wire_work: Any) -> None:
        global MOST_OCCUPIED
        with _lock:
            OCCUPIED.add(self)
            MOST_OCCUPIED = max(MOST_OCCUPIED, len(OCCUPIED))
        waited = threading.Thread(target=_wait_quietly, args=(wire_work,), daemon=True)
        waited.start()
        while waited.is_alive() and not self._is_aborted.is_set():
            waited.join(0.001)
        with _lock:
            OCCUPIED.discard(self)

    def abort(self) -> None:
        self._is_aborted.set()
        while any(not other._is_aborted.is_set() for other in list(OCCUPIED)):
            time.sleep(0.001)

    def shutdown(self) -> None:
        self._stream.synchronize()


def _wait_quietly(work: Any) -> None:
    with contextlib.suppress(RuntimeError):
        work.wait()
