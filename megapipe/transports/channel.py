"""Channels over one of torch.distributed's backends, and what a transport needs to make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.distributed_c10d import Store

from ..messages import MessageSpec
from ..p2p_communication import Channel, ConnectionLostError, Transfer
from .outbox import Outbox

__all__ = ["BackendChannel", "Members", "resolved"]


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
        allocate: makes a buffer to receive into.
        outbox: sends, and keeps messages until they have gone. None where the device does both.
        as_carried: the same memory in a type of numbers that the backend carries; None where it carries all.
    """

    def __init__(
        self,
        backend: Any,
        peer: int,
        tag: int,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        outbox: Outbox | None,
        as_carried: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self._backend = backend
        self._peer = peer
        self._tag = tag
        self._allocate = allocate
        self._outbox = outbox
        self._as_carried = as_carried

    def send(self, tensors: list[torch.Tensor]) -> None:
        tensors = resolved(tensors)
        try:
            if self._outbox is not None:
                self._outbox.send(self._backend, self._peer, self._tag, tensors)
                return
            for tensor in tensors:
                carried = tensor if self._as_carried is None else self._as_carried(tensor)
                self._backend.send([carried], self._peer, self._tag)
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error

    def receive(self, spec: MessageSpec) -> Transfer:
        buffers, works = [], []
        for shape, dtype, _ in spec.tensors:
            buffers.append(self._allocate(shape, dtype))
        try:
            for buffer in buffers:
                carried = buffer if self._as_carried is None else self._as_carried(buffer)
                works.append(self._backend.recv([carried], self._peer, self._tag))
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error
        return Transfer(spec, buffers, works)


def resolved(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as plain memory, without the graph behind them: torch keeps a conjugate or a negative as a flag on
    other numbers, which a transport does not see."""
    plain = []
    for tensor in tensors:
        plain.append((tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg().contiguous())
    return plain
