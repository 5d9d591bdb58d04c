"""Messages between stages: one channel per stage boundary and direction.

A channel carries one kind of message one way, and every chunk handles its microbatches in order, so the order of
sends and receives on a channel always matches, whatever the schedule does in between; a late receiver delays that
channel only. A step can therefore wait only for data, and data dependencies have no cycle.

Gloo honours tags, so all channels share one communicator there. NCCL does not: each channel has one of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import warnings
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from .memory import LARGE, Memory
from .messages import MessageSpec, TensorSpec, read_description
from .placement import Placement

__all__ = [
    "Channel",
    "Communicator",
    "ConnectionLostError",
    "DescribedTransfer",
    "Inbox",
    "Lookahead",
    "Transfer",
]


class ConnectionLostError(RuntimeError):
    """The transport gave up on a message: its other end is gone, or the connection was aborted."""


def _lost(error: RuntimeError) -> ConnectionLostError:
    """What the transport says, in a line."""
    return ConnectionLostError(str(error).partition("\n")[0])


class Transfer:
    """Tensors on their way to or from another rank, with the handles to wait for. Owns the tensors until then."""

    __slots__ = ("_works", "spec", "tensors")

    def __init__(self, spec: MessageSpec | None, tensors: list[torch.Tensor], works: Sequence[Any] = ()) -> None:
        self.spec = spec
        """What was expected; None where nobody asks (sends, gradients)."""
        self.tensors = tensors
        self._works = works

    def wait(self) -> list[torch.Tensor]:
        """Wait until the tensors may be used: the host on CPU, only the current stream on a device."""
        works, self._works = self._works, ()  # a second wait on a gloo work would hang
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise _lost(error) from error
        return self.tensors

    def is_completed(self) -> bool:
        """Never true on gloo before somebody waits."""
        return all(work.is_completed() for work in self._works)


class Channel(NamedTuple):
    """One way from this rank to a peer, or from the peer to this rank."""

    backend: Any
    """The transport itself: torch.distributed's functions around it cost more than a small message."""
    peer: int
    """Its rank in the backend."""
    tag: int
    memory: Memory
    """What it receives into."""
    outbox: Outbox
    """What has the messages that are sent until they have gone."""

    def send(self, tensors: list[torch.Tensor]) -> None:
        """Send a message, without waiting. The caller may drop the tensors at once, but must not write to them."""
        # As they read: a conjugate or a negative may be but a mark on other numbers, which a transport does not see.
        self.outbox.send(self, [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors])

    def start_sending(self, tensors: list[torch.Tensor]) -> Transfer:
        """The transfer must be kept until it has completed, or the message is lost."""
        try:
            works = [self.backend.send([tensor], self.peer, self.tag) for tensor in tensors]
        except RuntimeError as error:
            raise _lost(error) from error
        return Transfer(None, tensors, works)

    def receive(self, spec: MessageSpec) -> Transfer:
        """Post the receive of one message."""
        buffers = [self.memory.empty(t.shape, t.dtype) for t in spec.tensors]
        try:
            works = [self.backend.recv([buffer], self.peer, self.tag) for buffer in buffers]
        except RuntimeError as error:
            raise _lost(error) from error
        return Transfer(spec, buffers, works)


class Lookahead(NamedTuple):
    """How many receives of a channel are posted before they are asked for."""

    messages: int
    """That many at any time."""
    idle_bytes: int = 0
    """And as many as have this size together, when the rank has nothing better to do."""


class Inbox:
    """The receives of one channel during one step."""

    def __init__(self, channel: Channel, lookahead: Lookahead) -> None:
        self._channel = channel
        self._lookahead = lookahead
        self._expected: deque[MessageSpec] = deque()
        self._posted: deque[Transfer] = deque()

    def expect(self, spec: MessageSpec, count: int = 1) -> None:
        """`count` such messages will come, after those expected already."""
        self._expected.extend([spec] * count)

    def take(self) -> Transfer:
        """The oldest message not taken yet: posted by now, but perhaps not arrived. Nothing is posted in its place:
        who takes a message is about to use it, and others wait for what comes of it."""
        if not self._posted:
            self._post()
        return self._posted.popleft()

    def is_empty(self) -> bool:
        return not self._posted and not self._expected

    def post_ahead(self) -> None:
        while self._expected and len(self._posted) < self._lookahead.messages:
            self._post()

    def post_all(self) -> None:
        """As many as may be. Each takes the host as long as sending a small message does."""
        self.post_ahead()
        room = self._lookahead.idle_bytes - sum(tensor.nbytes for one in self._posted for tensor in one.tensors)
        while self._expected and room >= (size := self._expected[0].nbytes):
            self._post()
            room -= size

    def _post(self) -> None:
        self._posted.append(self._channel.receive(self._expected.popleft()))


class DescribedTransfer(Transfer):
    """A message whose description comes first: its receive can be posted only when that has arrived."""

    __slots__ = ("_channel", "_description")

    def __init__(self, description: Transfer, channel: Channel) -> None:
        super().__init__(None, [])
        self._description = description
        self._channel = channel

    def wait(self) -> list[torch.Tensor]:
        (description,) = self._description.wait()
        self.spec = read_description(description)
        self.tensors = self._channel.receive(self.spec).wait()
        return self.tensors


class Outbox(ABC):
    """Sends under way. Frees their tensors when they have completed."""

    @abstractmethod
    def send(self, channel: Channel, tensors: list[torch.Tensor]) -> None: ...

    @abstractmethod
    def drain(self) -> None:
        """Called at the end of a step: nothing is to be under way any more that the host could wait for."""

    @abstractmethod
    def close(self) -> None: ...


class PolledOutbox(Outbox):
    """For transports that tell when a send has completed."""

    def __init__(self) -> None:
        self._pending: deque[Transfer] = deque()

    def send(self, channel: Channel, tensors: list[torch.Tensor]) -> None:
        self.drain()
        self._pending.append(channel.start_sending(tensors))

    def drain(self) -> None:
        # Nothing is waited for: the device runs sends in order, and theirs are held here.
        while self._pending and self._pending[0].is_completed():
            self._pending.popleft()

    def close(self) -> None:
        self._pending.clear()


class WaitedOutbox(Outbox):
    """For gloo, which copies a message to the peer's socket in the time of whoever sends it, and where only a blocking
    wait tells that a send has completed. So one thread starts the large ones, and another waits for all.

    Neither does anything else, and while they copy or wait they do not hold the interpreter. Small messages are started
    by the caller: handing them over would take longer.
    """

    def __init__(self) -> None:
        self._to_start: queue.SimpleQueue[tuple[Channel, list[torch.Tensor]] | threading.Event | None]
        self._to_wait_for: queue.SimpleQueue[Transfer | threading.Event | None]
        self._to_start, self._to_wait_for = queue.SimpleQueue(), queue.SimpleQueue()
        self._num_handed_over = 0
        self._num_started = 0  # of these
        self._error: ConnectionLostError | None = None
        for run in (self._start_sends, self._wait_for_sends):
            threading.Thread(target=run, name="megapipe-sends", daemon=True).start()

    def send(self, channel: Channel, tensors: list[torch.Tensor]) -> None:
        is_small = sum(tensor.nbytes for tensor in tensors) < LARGE
        if is_small and self._num_started == self._num_handed_over:  # none that it could overtake
            self._to_wait_for.put(channel.start_sending(tensors))
        else:
            self._num_handed_over += 1
            self._to_start.put((channel, tensors))

    def drain(self) -> None:
        """Wait until all sends have completed. Raises what the first failed one raised."""
        drained = threading.Event()
        self._to_start.put(drained)
        drained.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._to_start.put(None)

    def _start_sends(self) -> None:
        while (item := self._to_start.get()) is not None:
            if isinstance(item, threading.Event):
                self._to_wait_for.put(item)
            else:
                try:
                    self._to_wait_for.put(item[0].start_sending(item[1]))
                except ConnectionLostError as error:
                    self._error = self._error or error
                self._num_started += 1
            del item  # nothing sent may stay alive while this waits for the next one
        self._to_wait_for.put(None)

    def _wait_for_sends(self) -> None:
        while (item := self._to_wait_for.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                try:
                    item.wait()
                except ConnectionLostError as error:
                    self._error = self._error or error
            del item


class Communicator:
    """The channels of one rank, built once per pipeline and kept between steps.

    Every rank of the pipeline must build it at the same time. The backends are made here and not by `dist.new_group`,
    which names a group of some ranks only by how many groups the process is in already: ranks that are in different
    numbers of groups then wait for each other for ever.

    Args:
        store: where the ranks of this pipeline find each other. Used for one communicator only.
        with_descriptions: also build the channels that describe messages ahead of them (`variable_seq_lengths`).
        timeout: seconds after which the transport itself gives up: a safety net behind the watchdog's.
    """

    def __init__(
        self,
        store: PrefixStore,
        pp_rank: int,
        pp_size: int,
        placement: Placement,
        num_chunks: int,
        device: torch.device,
        with_descriptions: bool,
        timeout: float,
    ) -> None:
        self.device = device
        self.forward: dict[int, Channel] = {}
        self.backward: dict[int, Channel] = {}
        self.descriptions: dict[int, Channel] = {}
        self._store = store
        self._timeout = datetime.timedelta(seconds=timeout)
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._num_stages = pp_size * num_chunks
        self._host_backend: Any = None
        self._pair_backends: list[Any] = []
        on_cpu = device.type == "cpu"
        host_outbox = WaitedOutbox()
        self._device_outbox = host_outbox if on_cpu else PolledOutbox()
        self._outboxes = {self._device_outbox, host_outbox}
        if on_cpu or with_descriptions:
            self._host_backend = dist.ProcessGroupGloo(PrefixStore("host", store), pp_rank, pp_size, self._timeout)
        if not on_cpu:
            _check_connections()
        for boundary in range(self._num_stages - 1):  # boundary b lies between the stages b and b + 1
            lower, upper = (placement.rank(stage, pp_size) for stage in (boundary, boundary + 1))
            if pp_rank not in (lower, upper) or lower == upper:
                continue
            peer = upper if pp_rank == lower else lower
            if on_cpu:
                self.forward[boundary] = self._host_channel(peer, 3 * boundary, host_outbox)
                self.backward[boundary] = self._host_channel(peer, 3 * boundary + 1, host_outbox)
            else:
                self.forward[boundary] = self._pair_channel(f"forward {boundary}", pp_rank == lower)
                self.backward[boundary] = self._pair_channel(f"backward {boundary}", pp_rank == upper)
            if with_descriptions:
                self.descriptions[boundary] = self._host_channel(peer, 3 * boundary + 2, host_outbox)

    def _host_channel(self, peer: int, tag: int, outbox: Outbox) -> Channel:
        return Channel(self._host_backend, peer, tag, Memory(torch.device("cpu")), outbox)

    def _pair_channel(self, name: str, sends: bool) -> Channel:
        """A channel with a communicator of its own, warmed up: communicators set up in the first step, in whatever
        order it reaches them, can wait for each other for ever. Here all ranks go through the boundaries in order."""
        if self.device.type != "cuda":
            raise ValueError(f"pipelines run on cpu (gloo) and cuda (nccl) devices, but the model is on {self.device}.")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        backend = dist.ProcessGroupNCCL(PrefixStore(name, self._store), 0 if sends else 1, 2, options)
        self._pair_backends.append(backend)
        channel = Channel(backend, 1 if sends else 0, 0, Memory(self.device), self._device_outbox)
        if sends:
            channel.send([torch.zeros(1, device=self.device)])
        else:
            channel.receive(MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))).wait()
        return channel

    def drain(self) -> None:
        """Wait until nothing sent is under way any more."""
        for outbox in self._outboxes:
            outbox.drain()
        for channel in (*self.forward.values(), *self.backward.values()):
            channel.memory.trim()

    def abort(self) -> None:
        """Make every operation under way fail, here and on the peers. The communicator is of no use afterwards."""
        for backend in self._pair_backends:
            backend.abort()
        if self._host_backend is not None:
            # Gloo has no abort, but a wait that times out closes all pairs of its group. A pair may be closed already,
            # and then refuses the receive.
            for peer in range(self._pp_size):
                if peer != self._pp_rank:
                    with contextlib.suppress(RuntimeError):
                        probe = self._host_backend.recv([torch.empty(1)], peer, 3 * self._num_stages)
                        probe.wait(datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        """Stop the helper thread and give the communicators back."""
        for outbox in self._outboxes:
            outbox.close()
        for backend in self._pair_backends:
            backend.shutdown()


def _check_connections() -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes all communicators and the computation share one hardware queue: "
            "pipeline stages will wait for each other. Unset it, or set it to 8 or more.",
            stacklevel=2,
        )
