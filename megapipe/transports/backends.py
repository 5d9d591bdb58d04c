"""How messages travel: over gloo between hosts, over NCCL between devices."""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from ..messages import MessageSpec, TensorSpec
from ..p2p_communication import Channel, ConnectionLostError, Lookahead, Transfer, Transport
from ..plan import ChannelName
from .memory import LARGE, Memory

__all__ = [
    "MARKS",
    "BackendChannel",
    "GlooTransport",
    "Members",
    "NcclTransport",
    "Outbox",
    "WaitedOutbox",
    "Waiter",
    "as_they_read",
]

PATIENCE = 10.0  # seconds until a communicator that does not come to its end is left to itself


MARKS: dict[str, Callable[[torch.device], Callable[[], bool]]] = {}
"""By type of device, a function that marks a point of its current stream and returns one that tells whether the device
has come there."""


def _mark_cuda(device: torch.device) -> Callable[[], bool]:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event.query


MARKS["cuda"] = _mark_cuda


class Members(NamedTuple):
    """Who is to be connected.

    Attributes:
        store: where the ranks of this pipeline find each other. Used for one communicator only.
        torch_store: the same place, for transports whose own threads look there, also when the interpreter is ending.
        ranks: their global ranks.
        timeout: seconds after which the transport itself gives up: a safety net behind the watchdog's.
    """

    store: Store
    torch_store: Store
    pp_rank: int
    ranks: Sequence[int]
    timeout: float


class BackendChannel(Channel):
    """A channel of one of torch.distributed's backends: its functions around them cost more than a small message.

    Args:
        peer: the other rank's number in the backend.
        memory: what it receives into.
        outbox: what has the messages that are sent until they have gone.
    """

    def __init__(self, backend: Any, peer: int, tag: int, memory: Memory, outbox: Outbox) -> None:
        self._backend = backend
        self._peer = peer
        self._tag = tag
        self._memory = memory
        self._outbox = outbox

    def send(self, tensors: list[torch.Tensor]) -> None:
        self._outbox.send(self, as_they_read(tensors))

    def start_sending(self, tensors: list[torch.Tensor]) -> Transfer:
        """Over gloo the transfer must be kept until it has completed, or the message is lost."""
        try:
            works = [self._backend.send([tensor], self._peer, self._tag) for tensor in tensors]
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return Transfer(None, tensors, works)

    def receive(self, spec: MessageSpec) -> Transfer:
        return self.receive_into([self._memory.empty(t.shape, t.dtype) for t in spec.tensors], spec)

    def receive_into(self, buffers: list[torch.Tensor], spec: MessageSpec) -> Transfer:
        try:
            works = [self._backend.recv([buffer], self._peer, self._tag) for buffer in buffers]
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return Transfer(spec, buffers, works)


def as_they_read(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A conjugate or a negative may be but a mark on other numbers, which a transport does not see."""
    return [tensor.resolve_conj().resolve_neg().contiguous() for tensor in tensors]


class Outbox(ABC):
    """Sends under way. Frees their tensors when they have completed."""

    @abstractmethod
    def send(self, channel: BackendChannel, tensors: list[torch.Tensor]) -> None: ...


class StreamOutbox(Outbox):
    """For devices: the memory of a tensor that is dropped stays taken until the stream has sent it."""

    def send(self, channel: BackendChannel, tensors: list[torch.Tensor]) -> None:
        channel.start_sending(tensors)


class Waiter:
    """A thread that waits for transfers one after the other, and holds each until then: over gloo only a blocking wait
    tells that a message has been sent, or has come.

    Args:
        then: called with each transfer that has completed, and with True where it was lost instead.
    """

    def __init__(self, name: str, then: Callable[[Transfer, bool], None] | None = None) -> None:
        self._queue: queue.SimpleQueue[Transfer | threading.Event | None] = queue.SimpleQueue()
        self._then = then
        self._error: ConnectionLostError | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, item: Transfer | threading.Event | None) -> None:
        """A transfer; an event that is set once all before it have completed; or None to end the thread."""
        self._queue.put(item)

    def check(self) -> None:
        """Raise what the first transfer that was lost has raised."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                is_lost = False
                try:
                    item.wait()
                except ConnectionLostError as error:
                    self._error, is_lost = self._error or error, True
                if self._then is not None:
                    self._then(item, is_lost)
            del item  # nothing sent may stay alive while this waits for the next one


class WaitedOutbox(Outbox):
    """For gloo, which copies a message to the peer's socket in the time of whoever sends it, and where only a blocking
    wait tells that a send has completed. So one thread starts the large ones, and another waits for all.

    Neither does anything else, and while they copy or wait they do not hold the interpreter. Small messages are started
    by the caller: handing them over would take longer.
    """

    def __init__(self) -> None:
        self._to_start: queue.SimpleQueue[Callable[[], Transfer] | threading.Event | None] = queue.SimpleQueue()
        self._started = Waiter("megapipe-sends")
        self._num_handed_over = 0
        self._num_started = 0  # of these
        self._error: ConnectionLostError | None = None
        threading.Thread(target=self._start_sends, name="megapipe-sends", daemon=True).start()

    def send(self, channel: BackendChannel, tensors: list[torch.Tensor]) -> None:
        is_small = sum(tensor.nbytes for tensor in tensors) < LARGE
        if is_small and self._num_started == self._num_handed_over:  # none that it could overtake
            self._started.put(channel.start_sending(tensors))
        else:
            self.hand_over(partial(channel.start_sending, tensors))

    def hand_over(self, start: Callable[[], Transfer]) -> None:
        """Let the thread call `start`, which sends a message and may wait before it does."""
        self._num_handed_over += 1
        self._to_start.put(start)

    def drain(self) -> None:
        """Wait until all sends have completed. Raises what the first failed one raised."""
        drained = threading.Event()
        self._to_start.put(drained)
        drained.wait()
        if self._error is not None:
            raise self._error
        self._started.check()

    def close(self) -> None:
        self._to_start.put(None)

    def _start_sends(self) -> None:
        while (item := self._to_start.get()) is not None:
            if isinstance(item, threading.Event):
                self._started.put(item)
            else:
                try:
                    self._started.put(item())
                except ConnectionLostError as error:
                    self._error = self._error or error
                self._num_started += 1
            del item
        self._started.put(None)


class GlooTransport(Transport):
    """Between hosts. Gloo honours tags, so all channels share one group. A receive posted ahead costs nothing, and a
    send completes only once its receive is posted."""

    lookahead = Lookahead(2, idle_bytes=LARGE)
    TAGS = ("forward", "backward", "description")
    UNUSED_TAG = 2**31 - 1

    def __init__(self, members: Members) -> None:
        self.outbox = WaitedOutbox()
        self._members = members
        self._backend: Any = None
        self._memories: list[Memory] = []

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        store, _, pp_rank, ranks, timeout = self._members
        # Not `dist.new_group`, which names a group of some ranks only by how many groups the process is in already:
        # ranks that are in different numbers of groups then wait for each other for ever.
        limit = datetime.timedelta(seconds=timeout)
        self._backend = dist.ProcessGroupGloo(PrefixStore("host", store), pp_rank, len(ranks), limit)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> BackendChannel:
        memory = Memory(torch.device("cpu"))
        self._memories.append(memory)
        tag = len(self.TAGS) * name.boundary + self.TAGS.index(name.kind)
        return BackendChannel(self._backend, peer, tag, memory, self.outbox)

    def drain(self) -> None:
        self.outbox.drain()
        for memory in self._memories:
            memory.trim()

    def abort(self) -> None:
        if self._backend is None:
            return
        # Gloo has no abort, but a wait that times out closes all pairs of its group. A pair may be closed already,
        # and then refuses the receive.
        for peer in range(len(self._members.ranks)):
            if peer != self._members.pp_rank:
                with contextlib.suppress(RuntimeError):
                    probe = self._backend.recv([torch.empty(1, device="cpu")], peer, self.UNUSED_TAG)
                    probe.wait(datetime.timedelta(milliseconds=1))

    def close(self) -> None:
        self.outbox.close()


class NcclTransport(Transport):
    """Between devices of their own. NCCL pairs the messages of a communicator by their order, and each receive is a
    kernel that occupies multiprocessors until its message has come. So there is one communicator per neighbour and
    direction, however many boundaries lie between the two; with one for both directions ranks would wait for each
    other, with one per boundary their buffers take gigabytes. Nothing is received before a step waits for it.

    Args:
        host: carries descriptions; None where none are wanted.
    """

    matches_by_order = True
    MAX_CTAS = 4
    """Multiprocessors that one message may occupy. NCCL's own choice is up to 16, which a computation beside it lacks.
    NCCL_MAX_CTAS in the environment overrules it."""

    def __init__(self, members: Members, device: torch.device, host: GlooTransport | None) -> None:
        _check_connections()
        self._members = members
        self._device = device
        self._host = host
        self._outbox = StreamOutbox()
        self._memory = Memory(device)
        self._backends: dict[tuple[int, int], Any] = {}
        self._is_aborted = False

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Communicators set up in the first step, in whatever order it reaches them, can wait for each other for ever.
        So they are warmed up here, in one order on all ranks."""
        if self._host is not None:
            self._host.connect(edges)
        warm_up = MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))
        pp_rank = self._members.pp_rank
        for sender, receiver in edges:
            if pp_rank not in (sender, receiver):
                continue
            # NCCL's own wait for the other rank could not be ended where that one fails before it comes.
            self._members.store.set(f"{sender} to {receiver}: {pp_rank}", "")
            self._members.store.wait([f"{sender} to {receiver}: {rank}" for rank in (sender, receiver)])
            self._backends[sender, receiver] = self._backend(sender, receiver)
            if pp_rank == sender:
                self._channel(receiver, sends=True).send([torch.zeros(1, device=self._device)])
            else:
                self._channel(sender, sends=False).receive(warm_up).wait()

    def _backend(self, sender: int, receiver: int) -> Any:
        _, store, pp_rank, ranks, timeout = self._members
        # High priority: a send should not wait for a multiprocessor behind the matrix products of the next forward,
        # and streams of this priority are fewer: 33 of one priority would share one, and could wait for each other.
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=timeout)
        options.config.max_ctas = self.MAX_CTAS
        # What logs and the flight recorder call it.
        options.group_name = f"megapipe {sender} to {receiver}"
        options.global_ranks_in_group = [ranks[sender], ranks[receiver]]
        prefix = PrefixStore(f"{sender} to {receiver}", store)
        return dist.ProcessGroupNCCL(prefix, 0 if pp_rank == sender else 1, 2, options)

    def _channel(self, peer: int, sends: bool) -> BackendChannel:
        pp_rank = self._members.pp_rank
        backend = self._backends[(pp_rank, peer) if sends else (peer, pp_rank)]
        return BackendChannel(backend, 1 if sends else 0, 0, self._memory, self._outbox)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        if name.kind == "description":
            assert self._host is not None
            return self._host.channel(name, peer, sends)
        return self._channel(peer, sends)

    def mark(self) -> Callable[[], bool]:
        return MARKS[self._device.type](self._device)

    def drain(self) -> None:
        """The host waits for descriptions only: the device sends and receives in its own time."""
        if self._host is not None:
            self._host.drain()
        self._memory.trim()

    def abort(self) -> None:
        self._is_aborted = True
        _call_at_once([backend.abort for backend in self._backends.values()])
        if self._host is not None:
            self._host.abort()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if not self._is_aborted:  # torch 2.6 has `_shutdown`
            _call_at_once([getattr(b, "shutdown", None) or b._shutdown for b in self._backends.values()])


def _call_at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own: to abort one communicator, or to end it, waits for what others have on the device.
    Those that do not return in time are left to themselves."""

    def call(function: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):  # there is nobody to tell: whoever waits for it is told of the cause
            function()

    threads = [threading.Thread(target=call, args=(function,), daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _check_connections() -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes communication and computation share one hardware queue: pipeline "
            "stages will wait for each other. Set it to 32, unless tensor parallelism needs the 1 (with sequence "
            "parallelism, before Blackwell): then nothing overlaps, but nothing hangs.",
            stacklevel=2,
        )
