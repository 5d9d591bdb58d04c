"""Channels over one of torch.distributed's backends, and what a transport needs to make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from ..messages import MessageSpec
from ..p2p_communication import Channel, ConnectionLostError, Transfer
from .outbox import Outbox


class Members(NamedTuple):
    """The ranks to be connected.

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
    """Calls the backend itself: torch.distributed's functions around it cost more than a small message.

    Args:
        peer: the other rank's number in the backend.
        allocate: makes a buffer to receive into, of a shape and a dtype.
        outbox: sends, and keeps messages until they have gone. None where the device does both.
        as_carried: the same memory in a type of numbers that the backend carries; None where it carries all.
    """

    def __init__(
        self,
        backend: Any,
        peer: int,
        tag: int,
        allocate: Callable[..., torch.Tensor],
        outbox: Outbox | None,
        as_carried: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._backend = backend
        self._peer = peer
        self._tag = tag
        self._allocate = allocate
        self._outbox = outbox
        self._as_carried = as_carried
        self._reserved: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor]) -> None:
        # As plain memory, without the graph behind it: torch keeps a conjugate or a negative as a flag on other
        # numbers, which a transport does not see.
        plain = []
        for tensor in tensors:
            detached = tensor.detach() if tensor.requires_grad else tensor
            plain.append(detached.resolve_conj().resolve_neg().contiguous())
        try:
            if self._outbox is not None:
                self._outbox.send(self._backend, self._peer, self._tag, plain)
                return
            for tensor in plain:
                carried = tensor if self._as_carried is None else self._as_carried(tensor)
                self._backend.send([carried], self._peer, self._tag)
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error

    def receive(self, spec: MessageSpec) -> Transfer:
        buffers, self._reserved, works = self._reserved, [], []
        for shape, dtype, _ in spec.tensors[len(buffers) :]:
            buffers.append(self._allocate(shape, dtype=dtype))
        try:
            for buffer in buffers:
                carried = buffer if self._as_carried is None else self._as_carried(buffer)
                works.append(self._backend.recv([carried], self._peer, self._tag))
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return Transfer(spec, buffers, works)

    def reserve(self, spec: MessageSpec) -> None:
        for shape, dtype, _ in spec.tensors[len(self._reserved) :]:
            self._reserved.append(self._allocate(shape, dtype=dtype))


class Connecting(Future[Any]):
    """A connection that a thread sets up, where nothing ends its waits: the thread is left to itself where this is
    cancelled."""

    def run(self, connect: Callable[[], Any]) -> None:
        """Called in that thread."""
        with suppress(InvalidStateError):  # cancelled
            try:
                connected = connect()
            except BaseException as error:
                self.set_exception(error)
            else:
                self.set_result(connected)

    def wait(self) -> None:
        """Raises ConnectionLostError where a rank has failed meanwhile, cannot be reached, or this is cancelled."""
        try:
            self.result()
        except CancelledError:
            raise ConnectionLostError("aborted while it was connecting") from None
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error


class ReceiveBufferPool:
    """Buffers of one channel. A large one is used again once nothing refers to it: fresh host memory comes from the
    system page by page, which may take longer than the message. (A device's allocator keeps memory by itself.)"""

    MIN_REUSED_BYTES = 2**20
    """Smaller ones malloc keeps by itself. It may keep more, up to 32 MiB with glibc, and never more than that: there
    this saves up to a sixth of a step."""
    NUM_KEPT = 2
    """Unused buffers that are kept: as many as a channel has receives posted ahead."""

    def __init__(self) -> None:
        self.buffers: list[torch.UntypedStorage] = []

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A fresh tensor each time: it becomes a leaf of the stage's graph and must not remember an earlier one."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < self.MIN_REUSED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        buffer = next((buffer for buffer in self.release() if buffer.nbytes() == num_bytes), None)
        if buffer is None:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cpu").untyped_storage()
            self.buffers.append(buffer)
        return torch.empty(0, dtype=dtype, device="cpu").set_(buffer).view(shape)

    def release(self) -> list[torch.UntypedStorage]:
        """Free all but `NUM_KEPT` of the unused buffers. Returns those."""
        self.buffers = [one for one in self.buffers if not one.is_shared()]  # which another process may still read
        unused = [buffer for buffer in self.buffers if torch._C._storage_Use_Count(buffer._cdata) == 1]
        surplus = {id(buffer) for buffer in unused[self.NUM_KEPT :]}
        self.buffers = [buffer for buffer in self.buffers if id(buffer) not in surplus]
        return unused[: self.NUM_KEPT]
