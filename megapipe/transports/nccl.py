"""Messages between devices, over NCCL."""

from __future__ import annotations

import datetime
import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..p2p_communication import Channel, Transport
from ..plan import ChannelName
from .channel import BackendChannel, Connecting, Members
from .gloo import GlooTransport
from .outbox import TaskThread

CARRIED = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""The types of numbers that NCCL carries. Others (int16, complex, float8 in some releases of torch) travel as bytes."""

BUFFER = 2**19
"""Bytes that NCCL buffers for each channel of a communicator at least: over PCIe, with its two channels of four. Over a
network it is twice as much, over NVLink eight times."""

PATIENCE = 10.0  # seconds until a communicator that does not come to its end is left to itself


def _as_carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as NCCL can carry it."""
    return tensor if tensor.dtype in CARRIED else tensor.detach().view(-1).view(torch.uint8)


class NcclTransport(Transport):
    """The transport of ranks with devices of their own. NCCL pairs the messages of a communicator by their order, and
    each receive is a kernel that occupies multiprocessors until its message has come. So there is one communicator per
    neighbour and direction, however many boundaries lie between the two; with one for both directions ranks would wait
    for each other, with one per boundary their buffers take gigabytes. Nothing is received before a step waits for it,
    but large messages one action early where `config.p2p_lookahead` says so. Each tensor of a message is a kernel of
    its own.

    Args:
        mark: marks a point of the current stream, see `Transport.mark`.
        max_ctas: multiprocessors that one message may occupy. NCCL's own choice is up to 16, which a computation beside
            it lacks. NCCL_MAX_CTAS in the environment overrules it.
    """

    matches_by_order = True

    def __init__(
        self, members: Members, device: torch.device, mark: Callable[[], Callable[[], bool]], max_ctas: int
    ) -> None:
        _check_connections()
        self.mark = mark
        self._members = members
        self._device = device
        self._max_ctas = max_ctas
        self.buffered_bytes = BUFFER * min(max_ctas, 4)  # over PCIe more do not help, and a network has 4 MiB
        self._host: GlooTransport | None = None
        """Carries headers."""
        self._backends: dict[tuple[int, int], Any] = {}
        self._threads: dict[tuple[int, int], TaskThread] = {}
        self._connecting: Connecting | None = None
        self._is_aborted = False

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Communicators set up in the first step, in whatever order it reaches them, can wait for each other for ever.
        So they are set up here, in one order on all ranks."""
        pp_rank = self._members.pp_rank
        for sender, receiver in edges:
            if pp_rank in (sender, receiver):
                # NCCL's own wait for the other rank could not be ended where that one fails before it comes.
                self._members.store.set(f"{sender} to {receiver}: {pp_rank}", "")
                self._members.store.wait([f"{sender} to {receiver}: {rank}" for rank in (sender, receiver)])
                self._set_up(sender, receiver)

    def _set_up(self, sender: int, receiver: int) -> None:
        """Exchange a first message, in the communicator's own thread: NCCL cannot be told to give up while it sets up a
        communicator. So where this is aborted, the thread is left to itself."""
        backend = self._backend(sender, receiver)
        exchange = backend.send if self._members.pp_rank == sender else backend.recv
        first = torch.zeros(1, device=self._device)
        peer = 1 if self._members.pp_rank == sender else 0
        self._connecting = connecting = Connecting()
        if self._is_aborted:
            connecting.cancel()
        self._threads[sender, receiver] = thread = TaskThread("megapipe-nccl")
        thread.put(partial(connecting.run, lambda: exchange([first], peer, 0).wait()))
        connecting.wait()
        self._backends[sender, receiver] = backend

    def connect_headers(self) -> None:
        self._host = GlooTransport(self._members)
        self._host.connect([])

    def _backend(self, sender: int, receiver: int) -> Any:
        _, store, pp_rank, ranks, timeout = self._members
        # High priority: a send should not wait for a multiprocessor behind the matrix products of the next forward,
        # and streams of this priority are fewer: 33 of one priority would share one, and could wait for each other.
        options: Any = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = datetime.timedelta(seconds=timeout)
        options.config.max_ctas = self._max_ctas
        # The name in logs and in the flight recorder.
        options.group_name = f"megapipe {sender} to {receiver}"
        options.global_ranks_in_group = [ranks[sender], ranks[receiver]]
        prefix = PrefixStore(f"{sender} to {receiver}", store)
        return dist.ProcessGroupNCCL(prefix, 0 if pp_rank == sender else 1, 2, options)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        if name.kind == "header":
            assert self._host is not None
            return self._host.channel(name, peer, sends)
        pp_rank = self._members.pp_rank
        backend = self._backends[(pp_rank, peer) if sends else (peer, pp_rank)]
        # No outbox: memory of a tensor that is dropped stays taken until the stream has sent it.
        allocate = partial(torch.empty, device=self._device)
        return BackendChannel(backend, 1 if sends else 0, 0, allocate, None, _as_carried)

    def drain(self) -> None:
        """The host waits for headers only: the device sends and receives in its own time."""
        if self._host is not None:
            self._host.drain()

    def find_error(self) -> str | None:
        """Torch hears of a rank that is gone on another node, while the device goes on waiting for it."""
        for edge, backend in list(self._backends.items()):
            if (kind := backend.get_error().name) != "SUCCESS":
                (peer,) = {*edge} - {self._members.pp_rank}
                return f"NCCL reports {kind} between rank {peer} and this one"
        return None

    def abort(self) -> None:
        self._is_aborted = True
        if self._connecting is not None:
            self._connecting.cancel()
        self._end(lambda backend: backend.abort)
        if self._host is not None:
            self._host.abort()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if not self._is_aborted:
            self._end(lambda backend: backend.shutdown)
        for thread in self._threads.values():
            thread.close()

    def _end(self, ending: Callable[[Any], Callable[[], None]]) -> None:
        """Each communicator in its own thread: to abort one, or to end it, waits for the kernels of others on the
        device. Those that do not return in time are left to themselves. The threads are there since it was set up: at
        the end of the interpreter none can be started."""
        ended = []
        for edge, backend in list(self._backends.items()):  # others may be added meanwhile
            is_over = threading.Event()
            self._threads[edge].put(ending(backend))
            self._threads[edge].put(is_over.set)
            ended.append(is_over)
        end = time.monotonic() + PATIENCE
        for is_over in ended:
            is_over.wait(max(0.0, end - time.monotonic()))


def _check_connections() -> None:
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 makes communication and computation share one hardware queue: pipeline "
            "stages will wait for each other. Set it to 32, unless tensor parallelism needs the 1 (with sequence "
            "parallelism, before Blackwell): then nothing overlaps, but nothing hangs.",
            stacklevel=2,
        )
