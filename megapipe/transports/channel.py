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
    """

    def __init__(
        self,
        backend: Any,
        peer: int,
        tag: int,
        allocate: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
        outbox: Outbox | None,
    ) -> None:
        self._backend = backend
        self._peer = peer
        self._tag = tag
        self._allocate = allocate
        self._outbox = outbox

    def send(self, tensors: list[torch.Tensor]) -> None:
        tensors = resolved(tensors)
        if self._outbox is None:
            self._start(self._backend.send, tensors)
        else:
            self._outbox.send(self.start_sending, tensors)

    def start_sending(self, tensors: list[torch.Tensor]) -> Transfer:
        """Start a send. Over gloo the transfer must be kept until it has completed, or the message is lost."""
        return Transfer(None, tensors, self._start(self._backend.send, tensors))

    def receive(self, spec: MessageSpec) -> Transfer:
        buffers = [self._allocate(t.shape, t.dtype) for t in spec.tensors]
        return Transfer(spec, buffers, self._start(self._backend.recv, buffers))

    def _start(self, operation: Callable[..., Any], tensors: list[torch.Tensor]) -> list[Any]:
        """Start it for each tensor. Returns what to wait for."""
        try:
            return [operation([tensor], self._peer, self._tag) for tensor in tensors]
        except RuntimeError as error:
            raise ConnectionLostError.of(error) from error


def resolved(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors as plain memory, without the graph behind them: torch keeps a conjugate or a negative as a flag on
    other numbers, which a transport does not see."""
    return [
        (tensor.detach() if tensor.requires_grad else tensor).resolve_conj().resolve_neg().contiguous()
        for tensor in tensors
    ]
