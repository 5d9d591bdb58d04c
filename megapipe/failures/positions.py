"""Where every rank of the job is: each writes it down every few seconds, which is its sign of life.

It also reads that of one other rank, the next: so each rank is watched by one, at the same cost for each however many
there are.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from typing import Any, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from .. import parallel_state
from .progress import Progress
from .timing import TIMING

NUM_MISSED = 12  # signs of life that a rank leaves out until those that wait give it up

POSITIONS = "megapipe rank {}"
"""The key of a rank's position, and with "size" the number of ranks: in the store itself and not in a part of it, where
`megapipe status` finds them."""


class Member(Protocol):
    """A pipeline, on one of its ranks: its `Watchdog`, which has a board with these positions."""

    name: str
    rank: int
    """Its own number in the pipeline."""
    ranks: list[int]
    """Their global numbers, by pipeline rank."""

    def current_progress(self) -> Progress: ...
    def await_messages(self) -> None: ...
    def notify(self) -> None: ...
    def poll(self) -> None: ...
    def end_waits(self) -> None: ...
    def close(self) -> None: ...


class Positions:
    """
    Args:
        store: without the prefixes by which torch and torchrun part it.
        job: tells it from earlier starts that used the same store.
    """

    def __init__(self, rank: int, size: int, store: Store, job: str) -> None:
        self.doing: str | None = None
        """The collective of this package that the main thread is in, outside steps too."""
        self.pipelines: set[Member] = set()
        """Those that this rank is in."""
        self._rank = rank
        self._next = (rank + 1) % size
        self._store = store
        self._job = job
        self._place: tuple[object, ...] = ()
        self._since = time.time()
        self._num_beats = 0
        self._last_beat = 0  # the number of the next rank's last sign of life
        self._num_missed = 0
        if rank == 0:
            store.set(POSITIONS.format("size"), str(size))
        self.beat()  # from here on it is missed

    def note(self) -> None:
        """Since when this rank is where it is."""
        everywhere = [pipeline.current_progress() for pipeline in list(self.pipelines)]
        place = (self.doing, *((one.step, one.action, one.awaited) for one in everywhere))
        if place != self._place:
            self._place, self._since = place, time.time()

    def beat(self) -> None:
        """Give a sign of life."""
        self._num_beats += 1
        position: dict[str, Any] = {"job": self._job, "beat": self._num_beats}
        position |= {"time": time.time(), "since": self._since}
        position |= {"host": socket.gethostname(), "pid": os.getpid(), "at": self.doing}
        if parallel_state.model_parallel_is_initialized():
            position["replica"] = parallel_state.get_data_parallel_rank()
            position["pipeline_rank"] = parallel_state.get_pipeline_model_parallel_rank()
        for pipeline in list(self.pipelines):
            progress = pipeline.current_progress()
            position["step"] = progress.step
            if progress.action is not None:
                at, peer = str(progress.action), progress.peer
                position["at"] = at if self.doing is None else f"{at}, {self.doing}"
                position |= {"awaited": progress.awaited, "peer": None if peer is None else pipeline.ranks[peer]}
        self._store.set(POSITIONS.format(self._rank), json.dumps(position))

    def find_silent(self) -> str | None:
        """Look at the next rank. Returns what to say of one that gives no sign of life while this one does not move.

        Counted in signs of life of this rank: then a job that was stopped as a whole is not given up when it goes on.
        """
        key = POSITIONS.format(self._next)
        if not self._store.check([key]):
            return None
        position = json.loads(self._store.get(key))
        if position["job"] != self._job:
            return None  # left behind by an earlier start: it has still to come
        self._num_missed = self._num_missed + 1 if position["beat"] == self._last_beat else 0
        self._last_beat = position["beat"]
        if self._num_missed < NUM_MISSED or not self.stands_still():
            return None
        return (
            f"global rank {self._next} on {position['host']} has given no sign of life for "
            f"{NUM_MISSED * TIMING.beat:g} s, and others wait: its process stands still or was killed, or its host or "
            "network is gone."
        )

    def stands_still(self) -> bool:
        """Whether the main thread, or the device, has long been at one place in a step or a collective."""
        is_busy = self.doing is not None or any(
            one.current_progress().action is not None for one in list(self.pipelines)
        )
        return is_busy and time.time() > self._since + NUM_MISSED * TIMING.beat


def read_positions(address: str) -> list[dict[str, Any] | None]:
    """The position of each rank of a job; None for a rank that has not begun a step.

    Args:
        address: HOST:PORT of the job's store.

    Raises:
        ValueError: there is no store at the address, or no job has written to it.
    """
    host, _, port = address.rpartition(":")
    limit = datetime.timedelta(seconds=TIMING.for_status)
    try:
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        size = POSITIONS.format("size")
        if not store.check([size]):
            raise ValueError(f"no rank has begun a step in the job with the store at {address} yet: ask again later.")
        keys = [POSITIONS.format(rank) for rank in range(int(store.get(size)))]
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the store at {address} does not answer ({reason}): is the job running?") from None
