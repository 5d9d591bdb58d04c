"""Messages between hosts, over gloo."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..p2p_communication import Channel, Lookahead, Transport
from ..plan import ChannelName
from ..process_groups import abort_gloo
from .channel import BackendChannel, Connecting, Members, ReceiveBufferPool
from .outbox import Outbox


class GlooTransport(Transport):
    """Gloo honours tags, so all channels share one group. A receive posted ahead costs nothing, and a send completes
    only once its receive is posted."""

    lookahead = Lookahead(2, idle_bytes=2**20)
    TAGS = ("forward", "backward", "header")

    def __init__(self, members: Members) -> None:
        self.outbox = Outbox()
        self._members = members
        self._backend = Connecting()
        self._pools: list[ReceiveBufferPool] = []

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Gloo waits for all ranks that have given their addresses, also for one that has failed since, and nothing
        ends that wait. So a thread connects, and is left to itself where this is aborted."""
        connect = threading.Thread(target=self._backend.run, args=[self._connect], name="megapipe-connect", daemon=True)
        connect.start()
        self._backend.wait()

    def _connect(self) -> Any:
        store, _, pp_rank, ranks, timeout = self._members
        # Not `dist.new_group`, which names a group of some ranks only by how many groups the process is in already:
        # ranks that are in different numbers of groups then wait for each other for ever.
        limit = datetime.timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(PrefixStore("host", store), pp_rank, len(ranks), limit)

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        pool = ReceiveBufferPool()
        self._pools.append(pool)
        tag = len(self.TAGS) * name.boundary + self.TAGS.index(name.kind)
        return BackendChannel(self._backend.result(), peer, tag, pool.allocate, self.outbox)

    def drain(self) -> None:
        self.outbox.drain()
        for pool in self._pools:
            if pool.buffers:
                pool.release()

    def abort(self) -> None:
        if not self._backend.cancel() and self._backend.exception() is None:
            abort_gloo(self._backend.result())

    def close(self) -> None:
        self.outbox.close()
