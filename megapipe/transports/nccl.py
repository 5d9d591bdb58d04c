"""Messages between devices, over NCCL."""

from __future__ import annotations

import contextlib
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

from ..messages import MessageSpec, TensorSpec
from ..p2p_communication import Channel, Transport
from ..plan import ChannelName
from .channel import BackendChannel, Members
from .gloo import GlooTransport

__all__ = ["NcclTransport"]

CARRIED = {
    *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
}
"""The types of numbers that NCCL carries. Others (int16, complex, float8 in some releases of torch) travel as bytes."""

PATIENCE = 10.0  # seconds until a communicator that does not come to its end is left to itself


class NcclChannel(BackendChannel):
    def _start(self, operation: Callable[..., Any], tensors: list[torch.Tensor]) -> list[Any]:
        return super()._start(operation, [_carried(tensor) for tensor in tensors])


def _carried(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as NCCL can carry it."""
    return tensor if tensor.dtype in CARRIED else tensor.detach().view(-1).view(torch.uint8)


class NcclTransport(Transport):
    """The transport of ranks with devices of their own. NCCL pairs the messages of a communicator by their order, and
    each receive is a kernel that occupies multiprocessors until its message has come. So there is one communicator per
    neighbour and direction, however many boundaries lie between the two; with one for both directions ranks would wait
    for each other, with one per boundary their buffers take gigabytes. Nothing is received before a step waits for it.
    Each tensor of a message is a kernel of its own.

    Args:
        mark: marks a point of the current stream, see `Transport.mark`.
        host: carries headers; None without dynamic shapes.
    """

    matches_by_order = True
    MAX_CTAS = 4
    """Multiprocessors that one message may occupy. NCCL's own choice is up to 16, which a computation beside it lacks.
    NCCL_MAX_CTAS in the environment overrules it."""

    def __init__(
        self, members: Members, device: torch.device, mark: Callable[[], Callable[[], bool]], host: GlooTransport | None
    ) -> None:
        _check_connections()
        self.mark = mark  # type: ignore[method-assign]
        self._members = members
        self._device = device
        self._host = host
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
        # The name in logs and in the flight recorder.
        options.group_name = f"megapipe {sender} to {receiver}"
        options.global_ranks_in_group = [ranks[sender], ranks[receiver]]
        prefix = PrefixStore(f"{sender} to {receiver}", store)
        return dist.ProcessGroupNCCL(prefix, 0 if pp_rank == sender else 1, 2, options)

    def _channel(self, peer: int, sends: bool) -> NcclChannel:
        pp_rank = self._members.pp_rank
        backend = self._backends[(pp_rank, peer) if sends else (peer, pp_rank)]
        # No outbox: memory of a tensor that is dropped stays taken until the stream has sent it.
        return NcclChannel(backend, 1 if sends else 0, 0, partial(_allocate, self._device), outbox=None)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        if name.kind == "header":
            assert self._host is not None
            return self._host.channel(name, peer, sends)
        return self._channel(peer, sends)

    def drain(self) -> None:
        """The host waits for headers only: the device sends and receives in its own time."""
        if self._host is not None:
            self._host.drain()

    def abort(self) -> None:
        self._is_aborted = True
        _call_at_once([backend.abort for backend in list(self._backends.values())])  # others may be added meanwhile
        if self._host is not None:
            self._host.abort()

    def close(self) -> None:
        if self._host is not None:
            self._host.close()
        if not self._is_aborted:  # torch 2.6 has `_shutdown`
            _call_at_once([getattr(b, "shutdown", None) or b._shutdown for b in self._backends.values()])


def _allocate(device: torch.device, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _call_at_once(functions: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own: to abort one communicator, or to end it, waits for the kernels of others on the
    device. Calls that do not return in time are left to themselves."""

    def call(function: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):  # a rank that waits for it is told of the cause by the watchdog
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
