"""One board for the job, in the store that torch.distributed was set up with: the first failure of any rank, and where
every rank is.

The helper thread of each rank looks at it while the main thread computes or waits, which asks the store nothing while
all is well. Once there is a failure it stays. The helper thread then writes down where its rank is, and ends the waits
of the main thread, which raises an error that names the failing rank, then and in every later call. A main thread that
does not raise is in a collective with the failed rank: then the process groups are aborted.
"""

from __future__ import annotations

import atexit
import json
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store, _world

from ..process_groups import abort_process_groups
from . import helper_thread, positions
from .errors import DisagreementError, NoResponseError, PipelineError
from .progress import Progress, report
from .store import InterruptibleStore
from .store_alarm import StoreAlarm
from .timing import TIMING


class Failure(NamedTuple):
    """A failure, as the ranks tell it.

    Attributes:
        text: why the step fails.
        pipeline: the name of the one whose ranks `text` numbers; empty where it numbers those of the job.
        num_ranks: of the pipeline.
        kind: the name of the error's class.
    """

    text: str
    pipeline: str = ""
    num_ranks: int = 0
    kind: str = ""


class Board:
    """
    Args:
        rank, size: of the job.
        store: the job's, which may outlive it, or have known others before.
        has_ended: whether torch.distributed was shut down.
        begin: has a function called again and again; None for the helper thread.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        store: Store,
        has_ended: Callable[[], bool],
        begin: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.failure: Failure | None = None
        """Once it is there, no step of this job begins any more."""
        self.has_raised = False
        """Whether the main thread has raised it."""
        self.has_aborted = False
        """Whether the process groups of this process are of no use any more."""
        self._has_ended = has_ended
        number = store.add(f"megapipe boards of {rank}", 1)
        own = PrefixStore(f"megapipe board {number}", store)
        self._store = InterruptibleStore(own, rank, size, check_failure=lambda: None)
        job = self._store.compare_set("name", "", uuid.uuid4().hex).decode()  # the same on all ranks
        root = _root(store)
        self.positions = positions.Positions(rank, size, root, job)
        self.pipelines = self.positions.pipelines
        self._next_look, self._next_beat = 0.0, time.monotonic() + TIMING.beat
        self._seconds_left = TIMING.until_abort
        self._lock = threading.RLock()  # of hearing
        self._store.add("ranks", 1)
        self._alarm = StoreAlarm(root, self._gives_up_store)
        (begin or helper_thread.begin)(self.watch)

    @classmethod
    def current(cls) -> Board | None:
        """That of torch.distributed as it is set up now; None where there are no other ranks."""
        global _current
        group = dist.group.WORLD
        if group is None or group.size() == 1:
            return None
        if _current is None or _current[0] is not group:
            with _making:  # ranks count their boards: two threads must not make one each
                if _current is None or _current[0] is not group:
                    ended = group  # not the global, which may be another one by then
                    board = cls(group.rank(), group.size(), _get_default_store(), lambda: ended not in _world.pg_map)
                    _current = (group, board)
        return _current[1]

    def _stop(self) -> None:
        """Look no more."""
        helper_thread.end(self.watch)
        self._alarm.end()

    # Main thread

    def check(self) -> None:
        """Raise the failure, if there is one. To be called before whatever ranks do together."""
        if self.has_raised:
            raise PipelineError(
                f"the pipeline has ended with a failure ({self.error()}): start all processes again, as torchrun does, "
                "and go on from the last checkpoint."
            )
        if self.failure is not None:
            self.has_raised = True
            raise self.error()

    def error(self) -> Exception:
        """What this rank raises for the failure, which is there."""
        assert self.failure is not None
        text, pipeline, _, kind = self.failure
        is_own = {one.name for one in list(self.pipelines)} == {pipeline}
        if pipeline and not is_own:
            text = f"in the pipeline of {pipeline}: {text}"
        return DisagreementError(text) if is_own and kind == DisagreementError.__name__ else PipelineError(text)

    def await_others(self) -> None:
        """Wait until all ranks have heard: they may need this process, which may hold the store."""
        with suppress(RuntimeError):
            end = time.monotonic() + TIMING.for_others
            while self._store.add("heard", 0) < self._store.add("ranks", 0) and time.monotonic() < end:
                time.sleep(helper_thread.interval(0.02))

    def learn_reason(self, error: BaseException, where: str) -> None:
        """After a connection broke: wait for a rank that tells why. If none does, tell that it broke.

        Args:
            where: what this rank did.
        """
        end = time.monotonic() + 2 * TIMING.for_others  # a rank beside one that died needs some time itself
        while self.failure is None and time.monotonic() < end:
            time.sleep(0.02)
        self.look()  # the helper thread may be about to hear
        if self.failure is None:
            reason = str(error).partition("\n")[0]
            self.publish(Failure(f"global rank {self.rank} lost its connection in {where} ({reason})"))
            self.await_others()

    # Either thread

    def publish(self, failure: Failure) -> bool:
        """Tell all ranks, and hear of it here. Returns False where another rank has published a failure before."""
        record = json.dumps(failure)
        try:
            is_first = bool(self._store.compare_set("failure", "", record) == record.encode())
            for one in list(self.pipelines):
                if one.name == failure.pipeline:
                    one.notify()
        except RuntimeError as error:  # the store is gone
            is_first = False
            if self.failure is None:
                text = failure.text if "store is gone" in failure.text else f"{failure.text}, and {error}"
                self._hear(Failure(text))
        self.look()
        return is_first

    def look(self) -> None:
        """Look for a failure."""
        with self._lock, suppress(RuntimeError):  # the store is gone
            if self.failure is None and self._store.check(["failure"]):
                self._hear(Failure(*json.loads(self._store.get("failure"))))
                self._store.add("heard", 1)

    def has_begun(self, pipeline: str, rank: int) -> None:
        """This rank's first step in a pipeline."""
        self._store.set(f"begun {pipeline} {rank}", "1")

    def _hear(self, failure: Failure) -> None:
        with suppress(RuntimeError):
            for one in list(self.pipelines):
                if one.name == failure.pipeline:
                    self._store.set(f"progress {one.name} {one.rank}", one.current_progress().as_json())
            if failure.kind == NoResponseError.__name__:
                failure = failure._replace(text=f"{failure.text}: {self._report(failure)}")
        self.failure = failure

    def _report(self, failure: Failure) -> str:
        """Where every rank of the failed pipeline is, once all that live have written it down."""
        ranks = range(failure.num_ranks)
        have_begun = [self._store.check([f"begun {failure.pipeline} {rank}"]) for rank in ranks]
        keys = [f"progress {failure.pipeline} {rank}" for rank in ranks]
        awaited = [key for key, has_begun in zip(keys, have_begun) if has_begun]
        end = time.monotonic() + TIMING.for_others
        while awaited and not self._store.check(awaited) and time.monotonic() < end:
            time.sleep(helper_thread.interval(0.02))
        written = [self._store.get(key).decode() if self._store.check([key]) else None for key in keys]
        return report([None if text is None else Progress(**json.loads(text)) for text in written], have_begun)

    # Helper thread

    def watch(self) -> None:
        if self._has_ended():
            self._stop()
            for pipeline in list(self.pipelines):
                pipeline.close()
            return
        self.positions.note()
        if self.failure is None:
            try:
                self._ask()
            except RuntimeError:
                # The store is gone, and with it the process that held it: those that need it find their connections
                # closed. Where the alarm has given it up, the main thread is still to be ended.
                if self.failure is None:
                    self._stop()
        if self.failure is not None:
            for pipeline in list(self.pipelines):
                pipeline.end_waits()
            self._end_collectives()

    def _ask(self) -> None:
        for pipeline in list(self.pipelines):
            pipeline.poll()
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + helper_thread.interval(TIMING.look)
            self.look()
        if now >= self._next_beat and self.failure is None:
            self._next_beat = now + TIMING.beat
            self.positions.beat()
            silent = self.positions.find_silent()
            if silent is not None:
                self.publish(Failure(silent))

    def _end_collectives(self) -> None:
        """Abort the process groups where the main thread does not raise. The time that it has is counted in calls of
        this, so that a process that was stopped as a whole has all of it when it goes on."""
        if self.has_raised or self.has_aborted:
            return
        self._seconds_left -= min(helper_thread.interval(TIMING.tick), TIMING.look)
        if self._seconds_left < 0:
            self.has_aborted = True
            text = f"megapipe: rank {self.rank} aborts its process groups: {self.error()}"
            print(text, file=sys.stderr, flush=True)
            abort_process_groups()

    # Alarm's thread. The helper thread may wait for the store, with all locks.

    def _gives_up_store(self, silence: float) -> bool:
        self.positions.note()
        if silence < positions.NUM_MISSED * TIMING.beat:
            return False
        if self.failure is not None or self._has_ended():
            return True
        if not self.positions.stands_still():
            return False
        text = (
            f"global rank {self.rank} waits, and torch.distributed's store has not answered for {silence:.0f} s: the "
            "process that holds it stands still, or its host or network is gone."
        )
        self._hear(Failure(text))
        return True


def is_connection_error(error: BaseException) -> bool:
    """Whether a collective failed since another process is gone. Gloo's errors bear no name of their own."""
    if isinstance(error, (dist.DistBackendError, dist.DistNetworkError)):
        return True
    return type(error) is RuntimeError and re.search(r"gloo/\S+\.(cc|h):\d|pair closure", str(error)) is not None


def join_ranks(ranks: Sequence[int]) -> str:
    """Like "rank 3" or "ranks 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def _root(store: Store) -> Store:
    """The store without the prefixes by which torch and torchrun part it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_current: tuple[dist.ProcessGroup, Board] | None = None
_making = threading.Lock()


@atexit.register
def _tell_end() -> None:
    """An exception that ends this process ends the waits of others."""
    error = getattr(sys, "last_value", None)  # set where the interpreter has printed it
    if error is None or hasattr(sys, "ps1") or _current is None or _current[0] not in _world.pg_map:
        return  # an interactive interpreter goes on behind an exception
    board = _current[1]
    board.positions.doing = "its end"
    if board.failure is None:
        board.publish(Failure(f"global rank {board.rank} ended with {type(error).__name__}: {error}"))
        board.await_others()
    board.has_raised = True
