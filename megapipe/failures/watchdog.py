"""One failure anywhere becomes one clear error everywhere.

The ranks of a pipeline share a part of the store that torch.distributed was set up with. A rank that fails in a step
publishes that there; so does one that has waited too long. A helper thread polls the store a few times a second. If it
finds a failure, it publishes its own rank's progress, so that a silent rank is known to be dead, and aborts the
communication that the main thread waits for. The main thread then raises an error that names the failing rank. It does
not touch the store while all is well. The ranks of other pipelines hear of the failure too (see `world`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import NoReturn

from ..p2p_communication import ConnectionLostError
from . import helper_thread
from .errors import DisagreementError, NoResponseError, PipelineError
from .progress import DeviceWaits, Progress
from .store import InterruptibleStore
from .world import Failure, World, is_connection_error

__all__ = ["Watchdog", "check_failures", "collective", "single_rank_step"]

PATIENCE = 3.0  # seconds given to the other ranks to publish their progress, or to read a failure
GRACE = 1.0  # seconds given to the main thread to raise by itself, before its transport is aborted under it


class Watchdog:
    """Watches over the steps of one pipeline on one of its ranks.

    Args:
        progress: where this rank is; only read here.
        abort: ends whatever the main thread waits for; called from the helper thread.
        has_ended: whether there is nothing left to watch over, because torch.distributed was shut down.
        world: all ranks of the job, which hear of a failure of this pipeline.
        ranks: their numbers in it, by pipeline rank.
    """

    def __init__(
        self,
        store: InterruptibleStore,
        progress: Progress,
        abort: Callable[[], None],
        has_ended: Callable[[], bool],
        world: World | None = None,
        ranks: Sequence[int] = (),
    ) -> None:
        self.progress = progress
        self.device_waits = DeviceWaits()
        self.timeout = 600.0
        """Seconds that a rank waits for a message, or for another rank to begin a step."""
        self.failure: Exception | None = None
        """Set by the helper thread when the step is to fail; the main thread raises it."""
        self._store = store
        self._rank = store.pp_rank
        self._ranks = range(store.pp_size)
        self._abort_communication = abort
        self._has_ended = has_ended
        self._subscribers: list[Callable[[], bool]] = []
        self._lock = threading.RLock()
        self._has_raised = threading.Event()
        self._has_aborted = False
        self._num_read = 0  # how many notifications have been dealt with
        self._waiting: tuple[int, object, str | None] = (0, None, None)
        self._waiting_since = 0.0
        self._world = world
        self.ranks = list(ranks)
        if world is not None:
            world.pipelines.add(self)

    @property
    def has_raised(self) -> bool:
        """Whether the main thread knows of the failure. After it the session cannot be used any more."""
        return self._has_raised.is_set()

    def subscribe(self, on_notification: Callable[[], bool]) -> None:
        """Have a function called from the helper thread after each notification, until it returns True."""
        self._subscribers.append(on_notification)

    def notify(self) -> None:
        """Make the helper threads of all ranks look into the store."""
        self._store.add("notifications", 1)

    def close(self) -> None:
        """Stop watching, and drop all callbacks."""
        watched.discard(self)
        helper_thread.end(self.watch)
        if self._world is not None:
            self._world.pipelines.discard(self)
        self._abort_communication, self._has_ended = (lambda: None), (lambda: True)
        self._subscribers = []

    # Main thread

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch over one step. Any exception in it makes the other ranks fail too."""
        if self.progress.step == 1:
            self._store.set(f"begun {self._rank}", "1")
        watched.add(self)
        helper_thread.begin(self.watch)
        try:
            self.check()
            yield
        except BaseException as error:
            self._fail(error)

    def check(self) -> None:
        """Raise the failure of another rank, if there is one. Also called by threads that connect for the main one."""
        if self.failure is not None:
            self._has_raised.set()
            self._leave_world()
            raise self.failure

    def await_messages(self) -> None:
        """Wait until all messages of the step have arrived, also where only the device waits for them: results computed
        without them are garbage. Costs the host next to none of its lead, since backwards follow the last message."""
        while not self.device_waits.all_have_arrived():
            self.check()
            time.sleep(0.0002)
        self.check()

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise the error that this rank should show for `error`, once the other ranks know of it."""
        if isinstance(error, ConnectionLostError):
            error = NoResponseError(f"rank {self._rank} lost its connection at {self.progress.action} ({error})")
            if self._world is not None:
                self._world.look()  # the other end may have raised a failure of another pipeline
        elif self._world is not None and is_connection_error(error):
            self._world.learn_reason(error, f"{self.progress.action}")
            error = PipelineError(str(error))
        is_first = self.failure is None and self._publish(error)
        self._num_read = -1  # poll in any case
        self.poll()  # lets the others know that this rank has heard
        self._has_raised.set()
        self._abort()
        if is_first and self.failure is None:
            # The others may need this process, which may hold the store, until they have read the failure.
            self._await_progress()
            if self._world is not None:
                self._world.await_others()
        self._leave_world()
        if self.failure is not None and isinstance(error, PipelineError):
            raise self.failure from None  # the transport's own error only hides the reason
        if isinstance(error, NoResponseError):
            raise PipelineError(
                f"{error}, and torch.distributed's store does not answer: the process that held it ended without a "
                "word (killed, or out of memory?)."
            ) from None
        raise error

    def _leave_world(self) -> None:
        if self._world is not None:
            self._world.end()

    # Helper thread

    def watch(self) -> None:
        """Poll, and abort the communication of a main thread that does not raise by itself."""
        if self._has_ended():
            self.close()
            return
        self.poll()
        if self.failure is not None and not self._has_aborted:
            if self.progress.action is not None and self.progress.awaited is None:
                self._has_raised.wait(GRACE)  # it computes, and checks at each of its verbs
            self._abort()

    # Either thread

    def current_progress(self) -> Progress:
        """The device's, where that waits for a message: the host may have left the step long ago."""
        return self.device_waits.current() or self.progress

    def hear(self, failure: Failure) -> None:
        """Of a failure anywhere. Those of this pipeline itself are told by its own part of the store."""
        if failure.pipeline == self.ranks:
            self._num_read = -1
            self.poll()
        elif self.failure is None:
            self.failure = PipelineError(str(failure))

    def poll(self) -> None:
        """Look into the store: one request, where there are no new notifications."""
        with self._lock:
            try:
                has_waited_too_long = self._seconds_waited() > self.timeout
                num_notifications = self._store.add("notifications", 0)
                if num_notifications != self._num_read:
                    are_done = [on_notification() for on_notification in self._subscribers]
                    if self.failure is None and self._store.check(["failure"]):
                        self._on_failure(**json.loads(self._store.get("failure")))
                    if all(are_done):
                        self._num_read = num_notifications
                if has_waited_too_long and self.failure is None:
                    progress = self.current_progress()
                    message = progress.awaited if progress.peer is None else "a message"
                    text = f"rank {self._rank} waited longer than {self.timeout:g} s for {message}"
                    self._publish(NoResponseError(text))
            except RuntimeError:
                # The store is gone, and with it the process that held it: the main thread will find its connections
                # closed, if it has not been told of a failure.
                if self.failure is None:
                    self.close()

    def _abort(self) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            self._abort_communication()

    def _publish(self, error: BaseException) -> bool:
        """Tell the other ranks why the step fails. Returns False where another rank has published a failure before."""
        text = _text_of(error)
        if not isinstance(error, (PipelineError, DisagreementError)):
            text = f"rank {self._rank} failed at {self.progress.action}: {type(error).__name__}: {text}"
        record = json.dumps({"rank": self._rank, "kind": type(error).__name__, "text": text})
        try:
            is_first = bool(self._store.compare_set("failure", "", record) == record.encode())
            self.notify()
        except RuntimeError:
            return False  # the store is gone, and with it the process that held it
        return is_first

    def _on_failure(self, rank: int, kind: str, text: str) -> None:
        """A rank has failed, or waited too long."""
        progress = asdict(self.current_progress())
        if progress["action"] is not None:
            progress["action"] = str(progress["action"])
        self._store.set(f"progress {self._rank}", json.dumps(progress))
        if kind == NoResponseError.__name__:
            text = f"{text}: {self._report()}"
            self.failure = PipelineError(text)
        elif rank == self._rank:
            pass  # the main thread is about to raise it
        elif kind == DisagreementError.__name__:
            self.failure = DisagreementError(text)
        else:
            self.failure = PipelineError(text)
        if rank == self._rank and self._world is not None:
            self._world.publish(Failure(text, self.ranks))

    def _seconds_waited(self) -> float:
        """How long the main thread, or the device, has been waiting for one and the same message."""
        progress = self.current_progress()
        waiting = (progress.step, progress.action, progress.awaited)
        if waiting != self._waiting or progress.awaited is None:
            self._waiting, self._waiting_since = waiting, time.monotonic()
        return time.monotonic() - self._waiting_since

    def _await_progress(self) -> None:
        """Wait until all ranks that have begun a step in this session have published their progress."""
        try:
            others = [rank for rank in self._ranks if rank != self._rank and self._store.check([f"begun {rank}"])]
            keys = [f"progress {rank}" for rank in others]
            end = time.monotonic() + PATIENCE
            while keys and not self._store.check(keys) and time.monotonic() < end:
                time.sleep(0.02)
        except RuntimeError:
            pass  # the store is gone, and no rank can publish anything

    def _report(self) -> str:
        """Where every rank is."""
        self._await_progress()
        everybody: list[Progress | None] = []
        for rank in self._ranks:
            key = f"progress {rank}"
            everybody.append(Progress(**json.loads(self._store.get(key))) if self._store.check([key]) else None)
        places = [self._place(rank, progress) for rank, progress in enumerate(everybody)]
        lines = []
        for rank, one in enumerate(everybody):
            if one is None or one.awaited is None:
                lines.append(f"rank {rank} is {places[rank]}")
            elif one.peer is None:
                lines.append(f"rank {rank} waits for {one.awaited}")
            else:
                lines.append(f"rank {rank} waits for {one.awaited} from rank {one.peer}, which is {places[one.peer]}")
        is_outside = any("any step" in place for place in places)
        question = " Does every rank call the schedule equally often?" if is_outside else ""
        return "; ".join(lines) + "." + question

    def _place(self, rank: int, progress: Progress | None) -> str:
        if progress is None:
            # A living process would have answered, whatever its main thread does.
            has_begun = self._store.check([f"begun {rank}"])
            silent = "silent: its process ended without a word (killed, or out of memory?), or stands still"
            return silent if has_begun else "still to begin any step"
        if progress.action is None:
            return f"outside any step, after {progress.step} of them"
        return f"at {progress.action}"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as another:
        return f"(no text: its __str__ raises {type(another).__name__})"


watched: set[Watchdog] = set()
"""Of all pipelines of this process, from the first step until the process group is gone."""


def check_failures() -> None:
    """Wait until all messages to this process have arrived, and raise any failure that it has heard of.

    To be called before weights change: the gradients of a step that failed elsewhere may be garbage.

    Raises:
        PipelineError: another rank failed, or did not respond in time.
        ValueError: the ranks were called with different arguments.
    """
    for watchdog in list(watched):
        watchdog.await_messages()
    if (world := World.current()) is not None:
        world.check()


@contextmanager
def collective(what: str) -> Iterator[None]:
    """Around collectives of this package: a rank that failed takes part in none.

    Those of threads in the background are left alone: they end when the process groups are aborted.

    Args:
        what: for those who ask where this rank is, like "the reduction of gradients".

    Raises:
        PipelineError: another rank failed, or fails meanwhile, or the connection to it broke.
        ValueError: the ranks were called with different arguments.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    check_failures()
    world = World.current()
    if world is None:
        yield
        return
    around, world.doing = world.doing, what
    try:
        yield
    except Exception as error:
        if is_connection_error(error):
            world.learn_reason(error, what)
            check_failures()
        raise
    finally:
        world.doing = around


@contextmanager
def single_rank_step() -> Iterator[None]:
    """Around one step of a pipeline of one rank. Any exception in it makes other replicas fail too.

    Raises:
        PipelineError: as `collective` does.
    """
    with collective("its step"):
        world = World.current()
        try:
            yield
        except Exception as error:
            if world is not None and not is_connection_error(error) and not isinstance(error, PipelineError):
                text = f"global rank {world.rank} failed in its step: {type(error).__name__}: {_text_of(error)}"
                world.publish(Failure(text, []))
                world.await_others()
                world.end()
            raise
