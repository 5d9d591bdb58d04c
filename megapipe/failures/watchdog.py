"""One pipeline on one of its ranks, beside the board of the job: what its main thread waits for, and how that ends.

The ranks of a pipeline share a part of the store that torch.distributed was set up with. A rank that fails in a step
publishes that on the board, and makes the others of its pipeline look there at once; so does one that has waited too
long. The main thread does not touch the store while all is well.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from ..p2p_communication import ConnectionLostError
from .board import Board, Failure, is_connection_error
from .errors import DisagreementError, NoResponseError, PipelineError, text_of
from .progress import DeviceWaits, Progress
from .store import InterruptibleStore, StoreGoneError

GRACE = 1.0  # seconds given to the main thread to raise by itself, before its transport is aborted under it


class Watchdog:
    """Watches over the steps of one pipeline on one of its ranks.

    Args:
        board: of the job.
        name: of the pipeline, the same on all of its ranks.
        ranks: their numbers in the job, by pipeline rank.
        store: the pipeline's part.
        abort: ends whatever the main thread waits for; called from the helper thread.
        find_error: tells what has become of a connection, where that is known though no call has failed.
        has_ended: whether there is nothing left to watch over, because the process group was destroyed.
        now: the clock that waits are measured by.
    """

    def __init__(
        self,
        board: Board,
        name: str,
        ranks: Sequence[int],
        store: InterruptibleStore,
        abort: Callable[[], None],
        find_error: Callable[[], str | None],
        has_ended: Callable[[], bool],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.board = board
        self.name = name
        self.rank = store.pp_rank
        self.ranks = list(ranks)
        self.progress = Progress()
        self.device_waits = DeviceWaits()
        self.timeout = 600.0
        """Seconds that a rank waits for a message, or for another rank to begin a step."""
        self.is_refused = False
        """Whether all ranks raise before they compute anything, and nothing has to be ended."""
        self._store = store
        self._abort_communication = abort
        self._find_error = find_error
        self._has_ended = has_ended
        self._now = now
        self._subscribers: list[Callable[[], bool]] = []
        self._lock = threading.RLock()
        self._has_raised = threading.Event()
        self._has_aborted = False
        self._num_read = 0  # how many notifications have been dealt with
        self._waiting: tuple[int, object, str | None] = (0, None, None)
        self._waiting_since = 0.0
        board.pipelines.add(self)

    def subscribe(self, on_notification: Callable[[], bool]) -> None:
        """Have a function called from the helper thread after each notification, until it returns True."""
        self._subscribers.append(on_notification)

    def notify(self) -> None:
        """Make the helper threads of all ranks of the pipeline look into the store."""
        self._store.add("notifications", 1)

    def close(self) -> None:
        """Stop watching, and drop all callbacks."""
        self.board.pipelines.discard(self)
        self.device_waits.close()
        self._abort_communication, self._find_error, self._has_ended = (lambda: None), (lambda: None), (lambda: True)
        self._subscribers = []

    # Main thread

    @contextmanager
    def step(self) -> Iterator[None]:
        """Watch over one step. Any exception in it makes the other ranks fail too, and all later steps, unless all
        ranks refuse the step."""
        if self.board.has_raised:
            self.board.check()
        self.is_refused = False
        progress = self.progress
        progress.step, progress.action = progress.step + 1, "the start of its step"
        try:
            self.check()
            if progress.step == 1:
                self.board.has_begun(self.name, self.rank)
            yield
        except BaseException as error:
            if self.is_refused:
                raise
            self._fail(error)
        finally:
            progress.action = progress.awaited = progress.peer = None

    def check(self) -> None:
        """Raise the failure, if there is one. Also called by threads that connect for the main one."""
        if self.board.failure is not None:
            self._has_raised.set()
            raise self.board.error()

    def await_messages(self) -> None:
        """Wait until all messages of the step have arrived, also where only the device waits for them: results computed
        without them are garbage. Costs the host next to none of its lead, since backwards follow the last message.

        The device alone knows: torch counts a message as completed, too, whose connection has broken. Then the device
        goes on only once the transport is aborted, and that is after the failure has been heard of."""
        while not self.device_waits.are_over() and self.board.failure is None:
            time.sleep(0.0002)

    def _fail(self, error: BaseException) -> NoReturn:
        """Raise the error that this rank should show for `error`, once the other ranks know of it."""
        self._has_raised.set()
        if isinstance(error, ConnectionLostError):
            error = NoResponseError(f"rank {self.rank} lost its connection at {self.progress.action} ({error})")
            self.board.look()  # the other end may have raised another's failure
        elif is_connection_error(error):
            if not isinstance(error, StoreGoneError):
                self.board.learn_reason(error, f"{self.progress.action}")
            error = PipelineError(str(error))
        is_first = self.board.failure is None and self._publish(error)
        self._abort()
        if is_first and not isinstance(error, NoResponseError):  # the others have told where they are, or never will
            self.board.await_others()
        self.board.has_raised = True
        if isinstance(error, PipelineError):
            raise self.board.error() from None  # the transport's own error only hides the reason
        raise error

    # Helper thread

    def end_waits(self) -> None:
        """Abort the communication of a main thread that does not raise by itself."""
        if not self._has_aborted:
            if self.progress.action is not None and self.progress.awaited is None:
                self._has_raised.wait(GRACE)  # it computes, and checks at each of its verbs
            self._abort()

    # Either thread

    def current_progress(self) -> Progress:
        """The device's, where that waits for a message: the host may have left the step long ago."""
        return self.device_waits.current() or self.progress

    def poll(self) -> None:
        """Look into the store: one request, where there are no new notifications."""
        if self._has_ended():
            self.close()
            return
        with self._lock:
            has_waited_too_long = self._seconds_waited() > self.timeout
            num_notifications = self._store.add("notifications", 0)
            if num_notifications != self._num_read:
                are_done = [on_notification() for on_notification in self._subscribers]
                self.board.look()
                if all(are_done):
                    self._num_read = num_notifications
            if self.board.failure is None:
                self._look_at_waits(has_waited_too_long)

    def _look_at_waits(self, has_waited_too_long: bool) -> None:
        progress = self.current_progress()
        broken = None if progress.awaited is None else self._find_error()
        if broken is not None:
            self._publish(NoResponseError(f"rank {self.rank} lost its connection at {progress.action} ({broken})"))
        elif has_waited_too_long:
            message = progress.awaited if progress.peer is None else "a message"
            self._publish(NoResponseError(f"rank {self.rank} waited longer than {self.timeout:g} s for {message}"))

    def _abort(self) -> None:
        if not self._has_aborted:
            self._has_aborted = True
            self._abort_communication()

    def _publish(self, error: BaseException) -> bool:
        """Tell the other ranks why the step fails. Returns False where another rank has published a failure before."""
        return self.board.publish(Failure(self.told(error), self.name, len(self.ranks), type(error).__name__))

    def told(self, error: BaseException) -> str:
        """What the other ranks are told of an exception."""
        if isinstance(error, (PipelineError, DisagreementError)):
            return str(error)
        return f"rank {self.rank} failed at {self.progress.action}: {type(error).__name__}: {text_of(error)}"

    def _seconds_waited(self) -> float:
        """How long the main thread, or the device, has been waiting for one and the same message."""
        progress = self.current_progress()
        waiting = (progress.step, progress.action, progress.awaited)
        if waiting != self._waiting or progress.awaited is None:
            self._waiting, self._waiting_since = waiting, self._now()
        return self._now() - self._waiting_since


def check_failures() -> None:
    """Wait until all messages to this process have arrived, and raise any failure that it has heard of.

    To be called before weights change: the gradients of a step that failed elsewhere may be garbage.

    Raises:
        PipelineError: another rank failed, or did not respond in time.
        ValueError: the ranks were called with different arguments.
    """
    board = Board.current()
    if board is not None:
        for pipeline in list(board.pipelines):
            pipeline.await_messages()
        board.check()


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
    board = Board.current() if threading.current_thread() is threading.main_thread() else None
    if board is None:
        yield
        return
    check_failures()
    positions = board.positions
    around, positions.doing = positions.doing, what
    try:
        yield
    except Exception as error:
        if is_connection_error(error):
            board.learn_reason(error, what)
            board.has_raised = True
            raise board.error() from error
        raise
    finally:
        positions.doing = around


@contextmanager
def single_rank_step() -> Iterator[None]:
    """Around one step of a pipeline of one rank. Any exception in it makes other replicas fail too.

    Raises:
        PipelineError: as `collective` does.
    """
    with collective("its step"):
        board = Board.current()
        try:
            yield
        except Exception as error:
            if board is not None and not is_connection_error(error) and not isinstance(error, PipelineError):
                text = f"global rank {board.rank} failed in its step: {type(error).__name__}: {text_of(error)}"
                board.publish(Failure(text))
                board.await_others()
                board.has_raised = True
            raise
