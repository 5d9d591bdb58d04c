"""A stand-in for ProcessGroupNCCL on the asynchronous device, with NCCL's constraints.

- A communicator runs its operations one after the other, on a stream of its own, each behind what the compute stream
  had when it was called. It pairs messages by their order alone.
- A receive occupies the device from the moment it runs until its message has come; so does a send larger than the
  link's buffers. `OCCUPIED` counts both, and `MOST_OCCUPIED` the most there were at a time.
- A message takes its time, by the streams' virtual clocks. What the link's buffers hold of it travels as soon as it is
  sent, and the rest once its receive runs.
- Over a network it hears, asynchronously, that its other end died or aborted: its works then count as completed, the
  group tells of an error, and the operation under way occupies the device until it is aborted here too. Torch ends
  the process a minute later, even where it is aborted by then: see `has_ended_process`. Within a machine nothing tells.
- A work of a receive holds its tensor, and other tensors may have the memory of a sent one once it has been sent.
- It carries the types of numbers that NCCL knows.
- To abort a communicator frees memory, which waits for the device: while another one occupies it, and is not being
  aborted too, it does not return.
"""

from __future__ import annotations

import contextlib
import datetime
import sys
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fakes.lazy_device import RACES, Moment, Stream, blocks_of, current_stream
from torch.distributed.distributed_c10d import Store

from megapipe.transports.nccl import CARRIED


class Link(NamedTuple):
    """What lies between two ranks, with NCCL's four channels. A sixteenth of that: the tests' messages are small."""

    buffered_bytes: int
    bytes_per_second: float
    tells_errors: bool


LINKS = {"nvlink": Link(2**20, 6e9, False), "pcie": Link(2**17, 1.5e9, False), "network": Link(2**18, 3e9, True)}
link = "nvlink"
"""The one between all ranks."""
connecting_time = 0.0
"""Seconds that the first operation of a communicator takes. About half a second on a machine."""

patience = 60.0
"""Seconds that it then waits for the other end."""

heard_at: float | None = None
"""When torch's own thread first saw an error."""

NUM_STREAMS = 32
"""Streams of one priority: the next one is the first again."""

COMMUNICATORS: weakref.WeakSet[LikeNccl] = weakref.WeakSet()
CONNECTING: set[LikeNccl] = set()
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
    """As torch's: completed after an error too."""

    def __init__(self, group: LikeNccl, tensors: list[Any]) -> None:
        self._group = group
        self._held = tensors
        self.is_done = Moment()

    def is_completed(self) -> bool:
        return self._group.error != "SUCCESS" or self.is_done.is_set()

    def wait(self) -> None:
        """The current stream waits, not the host."""
        current_stream().wait_for(self.is_done)


class LikeNccl:
    Options = Options

    def __init__(self, store: Store, rank: int, size: int, options: Options) -> None:
        assert size == 2
        assert options.group_name
        assert len(options.global_ranks_in_group) == 2
        self.options = options
        self.error = "SUCCESS"
        self.is_shut_down = False
        self._store, self._rank = store, rank
        self._wire: Any = None
        self._stream = Stream()
        self._sent_until = 0.0
        """By the clock of the other end, where that sends."""
        self._is_aborted = threading.Event()
        COMMUNICATORS.add(self)
        assert len(COMMUNICATORS) <= NUM_STREAMS, "two communicators share a stream"

    def send(self, tensors: list[Any], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        cell = tensor.cell
        is_large = tensor.nbytes > LINKS[link].buffered_bytes

        def run() -> None:
            numbers, clock = cell.cpu.contiguous(), torch.tensor(self._stream.now, dtype=torch.float64)
            if not is_large:
                numbers = numbers.clone()  # into NCCL's buffers
            sent = [self._wire.send([clock], peer, 1), self._wire.send([numbers], peer, 0)]
            if is_large:
                self._occupy(sent)
            else:
                threading.Thread(target=_wait_for, args=(sent, []), daemon=True).start()

        return self._enqueue(run, tensor, [])

    def recv(self, tensors: list[Any], peer: int, tag: int) -> Work:
        (tensor,) = tensors
        cell = tensor.cell

        def run() -> None:
            if cell.cpu.is_floating_point():
                cell.cpu.fill_(float("nan"))
            buffer, clock = torch.empty_like(cell.cpu), torch.zeros((), dtype=torch.float64)
            if self._occupy([self._wire.recv([clock], peer, 1), self._wire.recv([buffer], peer, 0)]):
                self._arrive(buffer.nbytes, clock.item())
                cell.cpu.copy_(buffer)

        return self._enqueue(run, tensor, tensors)

    def _arrive(self, num_bytes: int, sent_at: float) -> None:
        """The clock goes on until a message has come. The other end sends one after the other."""
        buffered, speed, _ = LINKS[link]
        begin = max(sent_at, self._sent_until)
        rest = max(0, num_bytes - buffered)
        self._stream.now = max(begin + num_bytes / speed, self._stream.now + rest / speed)
        self._sent_until = self._stream.now if rest else begin + num_bytes / speed

    def _hear_error(self) -> None:
        global heard_at
        self.error = "COMM_ERROR"
        heard_at = heard_at or time.monotonic()

    def get_error(self) -> Any:
        """What torch's own thread has seen: the device knows nothing of it."""
        return SimpleNamespace(name=self.error)

    def _enqueue(self, run: Any, tensor: Any, held: list[Any]) -> Work:
        assert tensor.dtype in CARRIED
        self._connect()
        tensor.record_stream(self._stream)
        work, ready = Work(self, held), current_stream().record()
        is_done = work.is_done  # what is queued holds no work: the caller may drop it, and with it the tensor
        self._stream.wait_for(ready)
        RACES.launch(self._stream, blocks_of(tensor), blocks_of(held), "a message")
        RACES.record(is_done, self._stream)

        def operation() -> None:
            try:
                if not self._is_aborted.is_set():
                    run()
            finally:
                self._stream.reach(is_done)  # after an abort too: the device goes on with what is in the buffer

        self._stream.put(operation)
        return work

    def _connect(self) -> None:
        """At the first operation. An abort that comes before it is over finds no communicator."""
        if self._wire is not None:
            return
        CONNECTING.add(self)
        try:
            time.sleep(connecting_time)
            self._store.set(f"connecting {self._rank}", "")
            begin = time.monotonic()
            while not self._store.check([f"connecting {1 - self._rank}"]):
                if time.monotonic() > begin + patience:
                    raise RuntimeError("the other end does not connect")
                time.sleep(0.01)
            self._wire = dist.ProcessGroupGloo(self._store, self._rank, 2, datetime.timedelta(seconds=60))
        finally:
            CONNECTING.discard(self)

    def _occupy(self, on_wire: list[Any]) -> bool:
        """Returns whether the message has passed."""
        global MOST_OCCUPIED
        with _lock:
            OCCUPIED.add(self)
            MOST_OCCUPIED = max(MOST_OCCUPIED, len(OCCUPIED))
        errors: list[RuntimeError] = []
        waited = threading.Thread(target=_wait_for, args=(on_wire, errors), daemon=True)
        waited.start()
        looked_at = 0.0
        while (waited.is_alive() or errors) and not self._is_aborted.is_set():
            waited.join(0.001)
            time.sleep(0.01 if errors else 0)
            if LINKS[link].tells_errors and time.monotonic() > looked_at + 0.05:
                looked_at = time.monotonic()
                if errors or self._store.check(["aborted"]):
                    self._hear_error()
        with _lock:
            OCCUPIED.discard(self)
        return not waited.is_alive() and not errors

    def abort(self) -> None:
        if self._wire is None:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._store.set("aborted", "")
        self._is_aborted.set()
        while any(not other._is_aborted.is_set() for other in list(OCCUPIED)):
            time.sleep(0.001)

    def shutdown(self) -> None:
        self._stream.synchronize()
        self.is_shut_down = True


def _wait_for(works: list[Any], errors: list[RuntimeError]) -> None:
    try:
        for work in works:
            work.wait()
    except RuntimeError as error:
        errors.append(error)


def has_ended_process() -> bool:
    """Whether torch would have (SIGABRT): by default it then lets its flight recorder write for a minute, and raises in
    a thread of its own (TORCH_NCCL_ASYNC_ERROR_HANDLING=3)."""
    return heard_at is not None and time.monotonic() > heard_at + 60


def complain() -> None:
    """As torch does, in its words, at the very end of a process."""
    if any(not one.is_shut_down and not one._is_aborted.is_set() for one in COMMUNICATORS):
        print("WARNING: destroy_process_group() was not called before program exit", file=sys.stderr)
