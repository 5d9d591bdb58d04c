"""Messages between hosts, over gloo."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..p2p_communication import ConnectionLostError, Lookahead, Transport
from ..parallel_state import abort_gloo
from ..plan import ChannelName
from .channel import BackendChannel, Members
from .outbox import Outbox
from .receive_buffers import ReceiveBufferPool

__all__ = ["GlooTransport"]


class GlooTransport(Transport):
    """Gloo honours tags, so all channels share one group. A receive posted ahead costs nothing, and a send completes
    only once its receive is posted."""

    lookahead = Lookahead(2, idle_bytes=2**20)
    TAGS = ("forward", "backward", "header")

    def __init__(self, members: Members) -> None:
        self.outbox = Outbox()
        self._members = members
        self._backend: Any = None
        self._pools: list[ReceiveBufferPool] = []

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        store, _, pp_rank, ranks, timeout = self._members
        # Not `dist.new_group`, which names a group of some ranks only by how many groups the process is in already:
        # ranks that are in different numbers of groups then wait for each other for ever.
        limit = datetime.timedelta(seconds=timeout)
        try:
            self._backend = dist.ProcessGroupGloo(PrefixStore("host", store), pp_rank, len(ranks), limit)
        except RuntimeError as error:  # a rank has failed meanwhile, or cannot be reached
            raise ConnectionLostError.of(error) from error

    def channel(self, name: ChannelName, peer: int, sends: bool) -> BackendChannel:
        pool = ReceiveBufferPool()
        self._pools.append(pool)
        tag = len(self.TAGS) * name.boundary + self.TAGS.index(name.kind)
        return BackendChannel(self._backend, peer, tag, pool.allocate, self.outbox)

    def drain(self) -> None:
        self.outbox.drain()
        for pool in self._pools:
            pool.release()

    def abort(self) -> None:
        if self._backend is not None:
            abort_gloo(self._backend)

    def close(self) -> None:
        self.outbox.close()
