"""One job, one view: all ranks hear of a failure on any of them, and can be asked where they are.

What the ranks of one pipeline tell each other at once (see `watchdog`) goes on to all other ranks from here: the helper
thread of each looks for a failure once a second. It also writes down every few seconds where its main thread is, which
is its sign of life, and reads that of one other rank, the next: so each rank is watched by one, at the same cost for
each however many there are. Nothing here is waited for while all is well.

A rank that does not raise soon after it has heard of a failure is in a collective with the failed one: its process
groups are aborted.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn, Protocol

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world

from .. import parallel_state
from ..parallel_state import abort_process_groups
from . import helper_thread
from .errors import PipelineError
from .progress import Progress
from .store import InterruptibleStore
from .store_alarm import StoreAlarm

__all__ = ["BEAT", "POSITIONS", "Failure", "World", "is_connection_error", "join_ranks"]

LOOK = 1.0  # seconds between two looks for a failure; in large jobs more
BEAT = 5.0  # seconds between two signs of life
NUM_MISSED = 12  # signs of life that a rank leaves out until those that wait give it up
PATIENCE = 3.0  # seconds given to the other ranks to hear of a failure, and to a main thread to raise it

POSITIONS = "megapipe rank {}"
"""The key of a rank's position, and with "size" the number of ranks: in the store itself and not in a part of it, where
`megapipe status` finds them."""


class Failure(NamedTuple):
    """As the ranks tell it.

    Attributes:
        text: why the step fails.
        pipeline: the global ranks of the pipeline whose ranks `text` numbers; empty where it numbers those of the job.
    """

    text: str
    pipeline: list[int]

    def __str__(self) -> str:
        return f"in the pipeline of {join_ranks(self.pipeline)}: {self.text}" if self.pipeline else self.text


class Member(Protocol):
    """A pipeline, on one of its ranks."""

    ranks: list[int]
    """Their global numbers, by pipeline rank."""

    def current_progress(self) -> Progress: ...

    def hear(self, failure: Failure) -> None:
        """Called once, by the thread that finds the failure."""


class World:
    """All ranks of torch.distributed, from the first step or collective of this package until one of them fails.

    Every rank raises the failure of a world once, and goes on in the next world: so ranks that catch the error and go
    on meet again.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.failure: PipelineError | None = None
        self.has_aborted = False
        """Whether the process groups of this process are of no use any more."""
        self.doing: str | None = None
        """The collective of this package that the main thread is in, outside steps too."""
        self.pipelines: set[Member] = set()
        """Those that this rank is in."""
        self._group = group
        store = _get_default_store()
        number = store.add(f"megapipe worlds of {self.rank}", 1)
        own = PrefixStore(f"megapipe world {number}", store)
        self._store = InterruptibleStore(own, self.rank, self.size, check_failure=self.check)
        self._name = self._store.compare_set("name", "", uuid.uuid4().hex).decode()  # the same on all ranks
        self._positions = _root(store)
        self._num_beats = 0
        self._place: tuple[object, ...] = ()
        self._since = time.time()
        self._next_look, self._next_beat = 0.0, time.monotonic() + BEAT
        self._patience = 0.0  # seconds left to the main thread, once there is a failure
        self._last_beat = 0  # the number of the next rank's last sign of life
        self._num_missed = 0
        self._has_ended = False
        self._lock = threading.RLock()
        if self.rank == 0:
            self._positions.set(POSITIONS.format("size"), str(self.size))
        self._store.add("ranks", 1)
        self._beat()  # from here on it is missed
        self._alarm = StoreAlarm(self._positions, self._gives_up_store)
        helper_thread.begin(self.watch)

    @classmethod
    def current(cls) -> World | None:
        """None where torch.distributed is not in use.

        Raises:
            PipelineError: the process groups were aborted after a failure, or the connection to the store is lost.
        """
        global _current
        group = dist.group.WORLD
        if group is None or group.size() == 1:
            return None
        if _current is None or _current._group is not group:
            _current = cls(group)
        elif _current._has_ended:
            before = _current
            try:
                _current = cls(group)
            except dist.DistNetworkError:
                raise PipelineError(
                    f"global rank {before.rank} has no connection to torch.distributed's store any more, after a "
                    f"failure ({before.failure}): start all processes again."
                ) from None
            if before.has_aborted:
                _current._refuse(str(before.failure))
        return _current

    def _refuse(self, reason: str) -> NoReturn:
        """Go no further, and let nobody wait for this rank."""
        self.has_aborted = True
        text = (
            f"the process groups of global rank {self.rank} were aborted after a failure ({reason}): start all "
            "processes again."
        )
        self.publish(Failure(text, []))
        self.failure = PipelineError(reason)
        self.end()
        raise PipelineError(text)

    # Main thread

    def check(self) -> None:
        """Raise the failure, if there is one."""
        if self.failure is not None:
            self.end()
            raise self.failure

    def publish(self, failure: Failure) -> None:
        """Tell all ranks. Only the first failure of a world is told."""
        with suppress(RuntimeError):  # the store is gone, and with it the process that held it
            self._store.compare_set("failure", "", json.dumps(failure))

    def await_others(self) -> None:
        """Wait until all ranks have heard: they may need this process, which may hold the store."""
        with suppress(RuntimeError):
            end = time.monotonic() + PATIENCE
            while self._store.add("heard", 0) < self._store.add("ranks", 0) - 1 and time.monotonic() < end:
                time.sleep(0.02)

    def learn_reason(self, error: BaseException, where: str) -> None:
        """After a connection broke: wait for a rank that tells why. If none does, tell that it broke.

        Args:
            where: what this rank did.
        """
        if not self._await_failure():
            reason = str(error).partition("\n")[0]
            self.publish(Failure(f"global rank {self.rank} lost its connection in {where} ({reason})", []))
            self.look()
            self.await_others()

    def _await_failure(self) -> bool:
        """Whether some rank tells why connections are broken. A rank beside one that died needs some time itself."""
        end = time.monotonic() + 2 * PATIENCE
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        return self.failure is not None

    def end(self) -> None:
        """The main thread has raised the failure, or another of the same step."""
        with self._lock:  # the helper thread may be about to abort
            if self._has_ended:
                return
            self._has_ended = True
        helper_thread.end(self.watch)
        with suppress(RuntimeError):
            if self.failure is None:
                self.look()  # other pipelines of this process have still to hear of it
            if self.failure is None:
                self._store.add("heard", 1)
            self._store.leave()
        self._alarm.end()
        self.pipelines.clear()

    def _stop_watching(self) -> None:
        helper_thread.end(self.watch)
        self._alarm.end()

    # Helper thread

    def watch(self) -> None:
        if self._group not in _world.pg_map:
            self._stop_watching()
            return
        now = time.monotonic()
        self._note_place()
        try:
            if now >= self._next_look:
                self._next_look = now + helper_thread.interval(LOOK)
                self.look()
            if now >= self._next_beat and self.failure is None:
                self._next_beat = now + BEAT
                self._beat()
                self._watch_next()
        except RuntimeError:
            # The store is gone, and with it the process that held it: whoever needs that finds its connections closed.
            if self.failure is None:
                self._stop_watching()
        if self._has_run_out_of_patience():
            print(f"megapipe: rank {self.rank} aborts its process groups: {self.failure}", file=sys.stderr, flush=True)
            abort_process_groups()

    def _has_run_out_of_patience(self) -> bool:
        """Whether the main thread does not raise the failure that it was told of. Counted in calls of this, so that a
        process that was stopped as a whole has time to raise when it goes on."""
        with self._lock:  # the main thread may be raising
            if self.failure is None or self._has_ended or self.has_aborted:
                return False
            self._patience -= min(helper_thread.interval(helper_thread.TICK), LOOK)
            self.has_aborted = self._patience < 0
            return self.has_aborted

    def look(self) -> None:
        """For a failure. Either thread."""
        with self._lock, suppress(RuntimeError):  # the store is gone
            if self.failure is None and self._store.check(["failure"]):
                self._hear(Failure(*json.loads(self._store.get("failure"))))
                self._store.add("heard", 1)

    def _hear(self, failure: Failure) -> None:
        for pipeline in list(self.pipelines):
            pipeline.hear(failure)
        self._patience = PATIENCE
        self.failure = PipelineError(str(failure))

    def _note_place(self) -> None:
        everywhere = [pipeline.current_progress() for pipeline in list(self.pipelines)]
        place = (self.doing, *((one.step, one.action, one.awaited) for one in everywhere))
        if place != self._place:
            self._place, self._since = place, time.time()

    def _beat(self) -> None:
        self._num_beats += 1
        position: dict[str, Any] = {"world": self._name, "beat": self._num_beats}
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
        self._positions.set(POSITIONS.format(self.rank), json.dumps(position))

    def _watch_next(self) -> None:
        """Give the next rank up, if it gives no sign of life and this one does not move either. Counted in signs of
        life of this rank: then a job that was stopped as a whole is not given up when it goes on."""
        rank = (self.rank + 1) % self.size
        key = POSITIONS.format(rank)
        if not self._positions.check([key]):
            return
        position = json.loads(self._positions.get(key))
        if position["world"] != self._name:
            return  # left behind by an earlier start, or world: it has still to come to this one
        self._num_missed = self._num_missed + 1 if position["beat"] == self._last_beat else 0
        self._last_beat = position["beat"]
        if self._num_missed >= NUM_MISSED and self._stands_still() and self.failure is None:
            text = (
                f"global rank {rank} on {position['host']} has given no sign of life for "
                f"{NUM_MISSED * BEAT:g} s, and others wait: its process stands still or was killed, or its host or "
                "network is gone."
            )
            self.publish(Failure(text, []))
            self.look()

    def _stands_still(self) -> bool:
        """Whether the main thread, or the device, has long been at one place in a step or a collective."""
        is_busy = self.doing is not None or any(
            one.current_progress().action is not None for one in list(self.pipelines)
        )
        return is_busy and time.time() > self._since + NUM_MISSED * BEAT

    # Alarm's thread. The helper thread may wait for the store, with all locks.

    def _gives_up_store(self, silence: float) -> bool:
        self._note_place()
        if silence < NUM_MISSED * BEAT:
            return False
        if self.failure is not None or self._has_ended or self._group not in _world.pg_map:
            return True  # the store holds up only what is to come after this world
        if not self._stands_still():
            return False
        text = (
            f"global rank {self.rank} waits, and torch.distributed's store has not answered for {silence:.0f} s: the "
            "process that holds it stands still, or its host or network is gone."
        )
        self._hear(Failure(text, []))
        return True


def is_connection_error(error: BaseException) -> bool:
    """Whether a collective failed since another process is gone. Gloo's errors bear no name of their own."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return type(error) is RuntimeError and re.search(r"gloo/|pair closure", str(error)) is not None


def join_ranks(ranks: Sequence[int]) -> str:
    """Like "rank 3" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _root(store: Store) -> Store:
    """Without the prefixes by which torch and torchrun part it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_current: World | None = None


@atexit.register
def _tell_end() -> None:
    """An exception that ends this process ends the waits of others."""
    error = getattr(sys, "last_value", None)  # set where the interpreter has printed it
    world = _current
    if error is not None and world is not None and not world._has_ended and world._group in _world.pg_map:
        world.doing = "its end"
        if world.failure is None:
            world.publish(Failure(f"global rank {world.rank} ended with {type(error).__name__}: {error}", []))
            world.await_others()
        world.end()
