"""One failure anywhere becomes one clear error everywhere.

The ranks of a pipeline meet in the store that torch.distributed was set up with. A rank that fails in a step says so
there; so does one whose wait ran out. A helper thread looks at the store a few times a second: when it finds a failure
it notes down where its own rank is and aborts the communication that holds the main thread, which then raises an error
that names the failing rank. The main thread does not touch the store while all is well.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore

from .p2p_communication import ConnectionLostError

__all__ = ["PipelineError", "Position", "Watchdog"]

TICK = 0.25  # seconds between two looks at the store
PATIENCE = 3.0  # seconds given to the other ranks to say, or to read, what happened


class PipelineError(RuntimeError):
    """A step failed because of another rank, or waited too long. Says which rank, where it was, and why."""


class DisagreementError(ValueError):
    """The ranks of a pipeline were called with different arguments."""


class WaitRanOut(Exception):  # noqa: N818 - never raised: it stands for itself in the store
    """The watchdog's own word for a message that did not come in time."""


@dataclass(slots=True)
class Position:
    """Where a rank is in its step, kept up to date by its `Pipeline`."""

    action: object = "the start of its step"
    """The action begun last, which prints like "2B1"."""
    awaited: str | None = None
    """The message it waits for, like "the forward input of microbatch 3", if any."""
    peer: int | None = None
    """The pipeline rank that the message comes from."""


class Watchdog:
    """Watches over the steps of one pipeline on one of its ranks.

    Args:
        store: any torch.distributed store that all ranks of the pipeline share, and nobody else.
        pp_rank, pp_size: this rank's number in the pipeline, and how many there are.
    """

    def __init__(self, store: PrefixStore, pp_rank: int, pp_size: int) -> None:
        self.position = Position()
        self.timeout = 600.0
        self.abort: Callable[[], None] = lambda: None
        """Ends whatever the main thread waits for; called from the helper thread."""
        self.has_ended: Callable[[], bool] = lambda: False
        """Whether there is nothing left to watch over, because torch.distributed was shut down."""
        self.failure: Exception | None = None
        """Set by the helper thread when the step is to fail; the main thread raises it."""
        self._store = store
        self._rank = pp_rank
        self._size = pp_size
        self._lock = threading.RLock()
        self._num_steps = 0
        self._agreed: dict[str, str] = {}
        self._agreed_before: dict[str, str] = {}
        self._exchange = 0  # the step of this rank's last exchange of arguments, which made them `_agreed`
        self._settled = 0  # the last step whose arguments are known to this object
        self._posted: list[int] = []  # the steps whose arguments this rank has in the store
        self._num_requests = 0  # how many requests for an exchange have been answered
        self._requested: dict[int, int] = {}  # by rank, the step of the last of them
        self._seen: tuple[int, object, str | None] = (0, "", None)
        self._seen_since = 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch over one step. Any exception in it makes the other ranks fail too."""
        self._num_steps += 1
        self.position = Position()
        _start_watching(self)
        try:
            yield
        except BaseException as error:
            self._fail(error)

    def close(self) -> None:
        """Stop watching."""
        _watched.discard(self)

    def check(self) -> None:
        """Raise what another rank's failure has left for this one."""
        if self.failure is not None:
            raise self.failure

    def agree(self, arguments: dict[str, str]) -> None:
        """Make sure that ranks that have an argument in common have the same value for it.

        Costs nothing while the arguments stay as they were. When they change, the ranks exchange them; a rank where
        they did not change is made to take part by its helper thread. On disagreement, raises ValueError everywhere.
        """
        step = self._num_steps
        with self._lock:
            self._settled = step
            if arguments == self._agreed:
                return
            self._agreed_before, self._agreed, self._exchange = self._agreed, arguments, step
            self._post_arguments(step, arguments)
            self._store.set(f"request {self._rank}", str(step))  # all have answered the one before
            self._store.add("number of requests", 1)
        self._await_all(f"arguments {step}", f"began step {step}")
        with self._lock:
            everybody = [json.loads(self._store.get(f"arguments {step} {rank}")) for rank in range(self._size)]
            self._forget_arguments(before=step)  # everybody has come to this exchange
        for name in sorted({name for one in everybody for name in one}):
            ranks_by_value: dict[str, list[int]] = {}
            for rank, one in enumerate(everybody):
                if name in one:
                    ranks_by_value.setdefault(one[name], []).append(rank)
            if len(ranks_by_value) > 1:
                values = "; ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_by_value.items())
                raise DisagreementError(f"the ranks of the pipeline disagree on {name}: {values}. Make them the same.")

    def post(self, name: str, text: str) -> None:
        """Leave something for the other ranks to `collect`."""
        with self._lock:
            self._store.set(f"{name} {self._rank}", text)

    def withdraw(self, name: str) -> None:
        """Delete what this rank has posted, once nobody will ask for it."""
        with self._lock:
            self._store.delete_key(f"{name} {self._rank}")

    def collect(self, name: str) -> list[str]:
        """What each rank has posted under `name`, once all have."""
        self._await_all(name, f"came to the {name}")
        with self._lock:
            return [self._store.get(f"{name} {rank}").decode() for rank in range(self._size)]

    # Main thread

    def _await_all(self, name: str, reached: str) -> None:
        """Wait until every rank has posted under `name`."""
        end = time.monotonic() + self.timeout
        pause = 0.0005
        keys = [f"{name} {rank}" for rank in range(self._size)]
        while not self._has(*keys):
            self.check()
            if time.monotonic() > end:
                missing = [rank for rank, key in enumerate(keys) if not self._has(key)]
                raise PipelineError(
                    f"rank {self._rank} {reached} and waited {self.timeout:g} s for {_ranks(missing)} to do so too: "
                    "does every rank call the schedule equally often?"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise what this rank should show for `error`, once the other ranks know of it."""
        if isinstance(error, ConnectionLostError):
            # The other end is gone. Give it the time to say why.
            end = time.monotonic() + PATIENCE
            while self.failure is None and time.monotonic() < end:
                self._look()
                time.sleep(0.01)
            error = PipelineError(
                f"rank {self._rank} lost its connection at {self.position.action} ({error}): a process of this "
                "pipeline ended without a word (killed, or out of memory?)."
            )
        if self.failure is None and self._publish(error):
            self.abort()
            # The others may need this process, which may hold the store, until they have read why.
            self._await_positions()
        else:
            self._look()  # lets the others know that this rank has heard
        if self.failure is not None and isinstance(error, PipelineError):
            raise self.failure from None  # what the transport says of it only hides the reason
        raise error

    def _has(self, *keys: str) -> bool:
        with self._lock:  # not every store may be used by two threads at once
            return bool(self._store.check(list(keys)))

    # Either thread

    def _publish(self, error: BaseException) -> bool:
        """Tell the others why the step fails. Returns False where somebody else has told them already."""
        text = str(error)
        if not isinstance(error, (PipelineError, DisagreementError)):
            text = f"rank {self._rank} failed at {self.position.action}: {type(error).__name__}: {text}"
        record = json.dumps({"rank": self._rank, "kind": type(error).__name__, "text": text})
        try:
            return bool(self._store.compare_set("failure", "", record) == record.encode())
        except RuntimeError:
            return False  # the store is gone, and with it the process that held it

    def _answer_requests(self) -> None:
        """Tell ranks whose arguments changed in a step that here they did not."""
        num_requests = self._store.add("number of requests", 0)
        if num_requests == self._num_requests:
            return
        is_ahead = False
        for rank in range(self._size):
            step = int(self._store.get(f"request {rank}")) if self._has(f"request {rank}") else 0
            before = self._requested.get(rank, 0)
            if step > self._settled:
                is_ahead = True  # this rank has still to come to that step
            elif step > before:
                if step not in self._posted:
                    self._post_arguments(step, self._agreed if step > self._exchange else self._agreed_before)
                self._requested[rank] = step
                self._forget_arguments(before)  # all had come to that exchange before this one was asked for
        if not is_ahead:
            self._num_requests = num_requests

    def _post_arguments(self, step: int, arguments: dict[str, str]) -> None:
        self._store.set(f"arguments {step} {self._rank}", json.dumps(arguments))
        self._posted.append(step)

    def _forget_arguments(self, before: int) -> None:
        """Delete what this rank has posted for steps before one that all ranks have come to: nobody still reads it."""
        for step in self._posted:
            if step < before:
                self._store.delete_key(f"arguments {step} {self._rank}")
        self._posted = [step for step in self._posted if step >= before]

    def _look(self) -> None:
        """One look at the store."""
        with self._lock:
            try:
                self._answer_requests()
                if self.failure is None and self._has("failure"):
                    self._hear(**json.loads(self._store.get("failure")))
                elif self._seconds_waited() > self.timeout:
                    self._publish(WaitRanOut())
            except RuntimeError:
                # The store is gone, and with it the process that held it: the main thread will find its connections
                # closed.
                self.close()

    def _seconds_waited(self) -> float:
        """How long the main thread has been waiting for one and the same message."""
        seen = (self._num_steps, self.position.action, self.position.awaited)
        if seen != self._seen or self.position.awaited is None:
            self._seen, self._seen_since = seen, time.monotonic()
        return time.monotonic() - self._seen_since

    def _hear(self, rank: int, kind: str, text: str) -> None:
        """Another rank has failed, or somebody's wait ran out."""
        position = asdict(self.position) | {"action": str(self.position.action)}
        self._store.set(f"position {self._rank}", json.dumps(position))
        if kind == WaitRanOut.__name__:
            self.failure = PipelineError(self._report(rank))
        elif rank == self._rank:
            return  # the main thread is about to raise it
        elif kind == DisagreementError.__name__:
            self.failure = DisagreementError(text)
        else:
            self.failure = PipelineError(text)
        self.abort()

    def _await_positions(self) -> None:
        end = time.monotonic() + PATIENCE
        keys = [f"position {rank}" for rank in range(self._size) if rank != self._rank]
        try:
            while not self._has(*keys) and time.monotonic() < end:
                time.sleep(0.02)
        except RuntimeError:
            pass  # the store is gone, and nobody to wait for

    def _report(self, timed_out: int) -> str:
        """Where every rank was when the wait of one ran out."""
        self._await_positions()
        positions: list[Position | None] = []
        for rank in range(self._size):
            key = f"position {rank}"
            positions.append(Position(**json.loads(self._store.get(key))) if self._has(key) else None)
        places = ["outside any step" if one is None else f"at {one.action}" for one in positions]
        lines = [
            f"rank {rank} waits for {one.awaited} from rank {one.peer}, which is {places[one.peer]}"
            if one is not None and one.awaited is not None and one.peer is not None
            else f"rank {rank} is {places[rank]}"
            for rank, one in enumerate(positions)
        ]
        return f"rank {timed_out} waited longer than {self.timeout:g} s for a message: " + "; ".join(lines) + "."


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


# One helper thread per process looks after all pipelines, between their steps too: a rank that has left a step may
# still be asked for the arguments it had in it.

_watched: set[Watchdog] = set()
_stop = threading.Event()
_thread: threading.Thread | None = None
_thread_lock = threading.Lock()


def _start_watching(watchdog: Watchdog) -> None:
    global _thread
    with _thread_lock:
        _watched.add(watchdog)
        if _thread is None:
            _thread = threading.Thread(target=_watch, name="megapipe-watchdog", daemon=True)
            _thread.start()
            atexit.register(_stop_watching)


def _stop_watching() -> None:
    """A thread that is inside the store when the interpreter goes brings the process down with it."""
    assert _thread is not None
    _stop.set()
    _thread.join(PATIENCE)


def _watch() -> None:
    while not _stop.wait(TICK):
        for watchdog in list(_watched):
            if watchdog.has_ended():
                watchdog.close()
            else:
                watchdog._look()
