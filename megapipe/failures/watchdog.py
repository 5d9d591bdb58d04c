"""One failure anywhere becomes one clear error everywhere.

The ranks of a pipeline meet in the store that torch.distributed was set up with. A rank that fails in a step says so
there; so does one whose wait ran out. A helper thread looks at the store a few times a second: when it finds a failure
it notes down where its own rank is, so that silence tells who is dead, and aborts the communication that holds the main
thread, which then raises an error that names the failing rank. The main thread does not touch the store while all is
well.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NoReturn

from torch.distributed.distributed_c10d import Store

from ..p2p_communication import ConnectionLostError
from .errors import PipelineError, watched
from .progress import DeviceWaits, Position

__all__ = ["Watchdog"]

TICK = 0.25  # seconds between two looks at the store
PATIENCE = 3.0  # seconds given to the other ranks to say, or to read, what happened
GRACE = 1.0  # seconds given to the main thread to raise by itself, before its transport is aborted under it


class DisagreementError(ValueError):
    """The ranks of a pipeline were called with different arguments."""


class _UnansweredError(PipelineError):
    """Somebody did not come, or went. Every rank adds where all of them are."""


class Watchdog:
    """Watches over the steps of one pipeline on one of its ranks.

    Args:
        store: any torch.distributed store that all ranks of the session share, and nobody else.
        pp_rank, pp_size: this rank's number in the pipeline, and how many there are.
    """

    def __init__(self, store: Store, pp_rank: int, pp_size: int) -> None:
        self.position = Position()
        self.device_waits = DeviceWaits()
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
        self._has_raised = threading.Event()
        self._has_aborted = False
        self._num_steps = 0
        self._agreed: dict[str, str] = {}
        self._agreed_before: dict[str, str] = {}
        self._exchange = 0  # the step of this rank's last exchange of arguments, which made them `_agreed`
        self._settled = 0  # the last step whose arguments are known to this object
        self._posted: list[int] = []  # the steps whose arguments this rank has in the store
        self._news = 0  # how many failures and requests for an exchange have been dealt with
        self._requested: dict[int, int] = {}  # by rank, the step of the last of them
        self._seen: tuple[int, object, str | None] = (0, "", None)
        self._seen_since = 0.0

    @property
    def has_raised(self) -> bool:
        """Whether the main thread knows of the failure. After it nothing of the session is of use."""
        return self._has_raised.is_set()

    @property
    def num_steps(self) -> int:
        """How many steps have begun."""
        return self._num_steps

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch over one step. Any exception in it makes the other ranks fail too."""
        if self._num_steps == 0:
            self._store.set(f"begun {self._rank}", "1")
        self._num_steps += 1
        self.position = Position(self._num_steps)
        _start_watching(self)
        try:
            self.check()
            yield
        except BaseException as error:
            self._fail(error)
        self.position = Position(self._num_steps, None)

    def close(self) -> None:
        """Stop watching, and let go of those who are to be told."""
        watched.discard(self)
        self.abort, self.has_ended = (lambda: None), (lambda: True)

    def check(self) -> None:
        """Raise what another rank's failure has left for this one."""
        if self.failure is not None:
            self._has_raised.set()
            raise self.failure

    def settle(self) -> None:
        """Wait until all messages of the step have arrived, also where only the device waits for them: what was
        computed without them is garbage. Costs the host next to none of its lead, since backwards follow the last."""
        while not self.device_waits.all_have_arrived():
            self.check()
            time.sleep(0.0002)
        self.check()

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
            self._store.add("news", 1)
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

    def collect_from(self, rank: int, name: str) -> str:
        """What that rank has posted under `name`, once it has."""
        self._await_all(name, f"came to the {name}", [rank])
        with self._lock:
            return str(self._store.get(f"{name} {rank}").decode())

    # Main thread

    def _await_all(self, name: str, reached: str, ranks: Sequence[int] | None = None) -> None:
        """Wait until every rank has posted under `name`, or those in `ranks`."""
        end = time.monotonic() + self.timeout
        pause = 0.0005
        keys = {rank: f"{name} {rank}" for rank in (range(self._size) if ranks is None else ranks)}
        while not self._has(*keys.values()):
            self.check()
            if time.monotonic() > end:
                missing = [rank for rank, key in keys.items() if not self._has(key)]
                raise _UnansweredError(
                    f"rank {self._rank} {reached} and waited {self.timeout:g} s for {_ranks(missing)} to do so too"
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        self._look()  # others may have posted it, and then have given this rank up
        self.check()

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise what this rank should show for `error`, once the other ranks know of it."""
        if isinstance(error, ConnectionLostError):
            error = _UnansweredError(f"rank {self._rank} lost its connection at {self.position.action} ({error})")
        is_news = self.failure is None and self._publish(error)
        self._news = -1  # whatever there is
        self._look()  # lets the others know that this rank has heard
        self._has_raised.set()
        self._abort()
        if is_news and self.failure is None:
            # The others may need this process, which may hold the store, until they have read why.
            self._await_positions()
        if self.failure is not None and isinstance(error, PipelineError):
            raise self.failure from None  # what the transport says of it only hides the reason
        if isinstance(error, _UnansweredError):
            raise PipelineError(
                f"{error}, and torch.distributed's store does not answer: the process that held it ended without a "
                "word (killed, or out of memory?)."
            ) from None
        raise error

    def _abort(self) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            self.abort()

    def _has(self, *keys: str) -> bool:
        with self._lock:  # not every store may be used by two threads at once
            return bool(self._store.check(list(keys)))

    # Either thread

    def _publish(self, error: BaseException) -> bool:
        """Tell the others why the step fails. Returns False where somebody else has told them already."""
        text = _text_of(error)
        if not isinstance(error, (PipelineError, DisagreementError)):
            text = f"rank {self._rank} failed at {self.position.action}: {type(error).__name__}: {text}"
        record = json.dumps({"rank": self._rank, "kind": type(error).__name__, "text": text})
        with self._lock:
            try:
                is_first = bool(self._store.compare_set("failure", "", record) == record.encode())
                self._store.add("news", 1)
            except RuntimeError:
                return False  # the store is gone, and with it the process that held it
        return is_first

    def _answer_requests(self) -> bool:
        """Tell ranks whose arguments changed in a step that here they did not. Returns whether that is done."""
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
        return not is_ahead

    def _post_arguments(self, step: int, arguments: dict[str, str]) -> None:
        self._store.set(f"arguments {step} {self._rank}", json.dumps(arguments))
        self._posted.append(step)

    def _forget_arguments(self, before: int) -> None:
        """Delete what this rank has posted for steps before one that all ranks have come to: nobody still reads it."""
        for step in self._posted:
            if step < before:
                self._store.delete_key(f"arguments {step} {self._rank}")
        self._posted = [step for step in self._posted if step >= before]

    def watch(self) -> None:
        """What the helper thread does again and again."""
        if self.has_ended():
            self.close()
            return
        self._look()
        if self.failure is not None and not self._has_aborted:
            if self.position.action is not None and self.position.awaited is None:
                self._has_raised.wait(GRACE)  # it does not wait, and looks at each of its verbs
            self._abort()

    def _look(self) -> None:
        """One look at the store: one request, where there are no news."""
        with self._lock:
            try:
                has_waited_too_long = self._seconds_waited() > self.timeout
                news = self._store.add("news", 0)
                if news != self._news:
                    is_answered = self._answer_requests()
                    if self.failure is None and self._has("failure"):
                        self._hear(**json.loads(self._store.get("failure")))
                    if is_answered:
                        self._news = news
                if has_waited_too_long and self.failure is None:
                    position = self._where()
                    what = position.awaited if position.peer is None else "a message"
                    text = f"rank {self._rank} waited longer than {self.timeout:g} s for {what}"
                    self._publish(_UnansweredError(text))
            except RuntimeError:
                # The store is gone, and with it the process that held it: the main thread will find its connections
                # closed.
                self.close()

    def _seconds_waited(self) -> float:
        """How long the main thread, or the device, has been waiting for one and the same message."""
        position = self._where()
        seen = (position.step, position.action, position.awaited)
        if seen != self._seen or position.awaited is None:
            self._seen, self._seen_since = seen, time.monotonic()
        return time.monotonic() - self._seen_since

    def _where(self) -> Position:
        """Of the device, where that waits for a message: the host may have left the step long ago."""
        return self.device_waits.current() or self.position

    def _hear(self, rank: int, kind: str, text: str) -> None:
        """Another rank has failed, or somebody's wait ran out."""
        position = asdict(self._where())
        if position["action"] is not None:
            position["action"] = str(position["action"])
        self._store.set(f"position {self._rank}", json.dumps(position))
        if kind == _UnansweredError.__name__:
            self.failure = PipelineError(f"{text}: {self._report()}")
        elif rank == self._rank:
            return  # the main thread is about to raise it
        elif kind == DisagreementError.__name__:
            self.failure = DisagreementError(text)
        else:
            self.failure = PipelineError(text)

    def _await_positions(self) -> None:
        """Wait until all ranks that have begun a step in this session have said where they are."""
        try:
            others = [rank for rank in range(self._size) if rank != self._rank and self._has(f"begun {rank}")]
            keys = [f"position {rank}" for rank in others]
            end = time.monotonic() + PATIENCE
            while keys and not self._has(*keys) and time.monotonic() < end:
                time.sleep(0.02)
        except RuntimeError:
            pass  # the store is gone, and nobody to wait for

    def _report(self) -> str:
        """Where every rank is."""
        self._await_positions()
        positions: list[Position | None] = []
        for rank in range(self._size):
            key = f"position {rank}"
            positions.append(Position(**json.loads(self._store.get(key))) if self._has(key) else None)
        places = [self._place(rank, position) for rank, position in enumerate(positions)]
        lines = []
        for rank, one in enumerate(positions):
            if one is None or one.awaited is None:
                lines.append(f"rank {rank} is {places[rank]}")
            elif one.peer is None:
                lines.append(f"rank {rank} waits for {one.awaited}")
            else:
                lines.append(f"rank {rank} waits for {one.awaited} from rank {one.peer}, which is {places[one.peer]}")
        is_outside = any("any step" in place for place in places)
        question = " Does every rank call the schedule equally often?" if is_outside else ""
        return "; ".join(lines) + "." + question

    def _place(self, rank: int, position: Position | None) -> str:
        if position is None:
            # A living process would have answered, whatever its main thread does.
            has_begun = self._has(f"begun {rank}")
            silent = "silent: its process ended without a word (killed, or out of memory?), or stands still"
            return silent if has_begun else "still to begin any step"
        if position.action is None:
            return f"outside any step, after {position.step} of them"
        return f"at {position.action}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"(no text: its __str__ raises {type(another).__name__})"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


# One helper thread per process looks after all pipelines, between their steps too: a rank that has left a step may
# still be asked for the arguments it had in it.

_stop = threading.Event()
_thread: threading.Thread | None = None
_thread_lock = threading.Lock()


def _start_watching(watchdog: Watchdog) -> None:
    global _thread
    with _thread_lock:
        watched.add(watchdog)
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
        for watchdog in list(watched):
            watchdog.watch()
