"""One thread makes all requests of torch.distributed's store: a store that does not answer holds up no other thread.

torch does not give a request up. It waits until the kernel gives up the connection: if the host or the network is gone,
that takes a quarter of an hour; if the process that holds the store stands still, forever.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from . import helper_thread
from .errors import SilentStoreError

__all__ = ["LIMIT", "ask", "seconds_silent"]

SLICE = 1.0  # seconds: waits are counted in these, so that a process that was stopped for long gives up nothing
HELPER_LIMIT = 5.0  # seconds that the helper thread waits for a store that does not answer, since it has other work
LIMIT = 60.0  # seconds that any other thread does

Answer = TypeVar("Answer")

_requests: SimpleQueue[tuple[futures.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
_thread: threading.Thread | None = None
_lock = threading.Lock()
_has_ended = False
_silence = 0.0


def ask(request: Callable[[], Answer], check_failure: Callable[[], None] = lambda: None) -> Answer:
    """The answer to a request, which may use the store several times.

    Args:
        check_failure: called during the wait, but not in the helper thread; raises where the session has failed.

    Raises:
        SilentStoreError: the store has not answered for too long.
    """
    global _silence
    if _has_ended:
        return request()
    _start()
    future: futures.Future[Answer] = futures.Future()
    _requests.put((future, request))
    waited = 0.0
    while not _is_done(future):
        waited += SLICE
        is_helper = helper_thread.is_current()
        if is_helper:
            _silence += SLICE
        else:
            check_failure()
        if (silence := max(waited, _silence)) >= (HELPER_LIMIT if is_helper else LIMIT):
            future.cancel()
            raise SilentStoreError(
                f"torch.distributed's store has not answered for {silence:g} s: the process that holds it stands "
                "still, or its host or network is gone."
            )
    try:
        return future.result()
    finally:
        del future  # which holds an error whose traceback holds this frame


def seconds_silent() -> float:
    """For how long the helper thread has waited for the request under way, in one or several calls of `ask`."""
    return _silence


def _is_done(future: futures.Future[Any]) -> bool:
    with suppress(futures.TimeoutError):
        future.exception(SLICE)
    return future.done()


def _start() -> None:
    global _thread
    with _lock:
        if _thread is None:
            _thread = threading.Thread(target=_run, name="megapipe-store", daemon=True)
            _thread.start()


def _run() -> None:
    global _silence
    while (job := _requests.get()) is not None:
        future, request = job
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(request())
            except BaseException as error:
                future.set_exception(error)
            _silence = 0.0
        del job, future, request  # they hold stores, which a session gives up


@atexit.register
def _stop() -> None:
    """A thread that is inside the store when the interpreter goes brings the process down with it."""
    global _has_ended
    _has_ended = True
    if _thread is not None:
        _requests.put(None)
        _thread.join(helper_thread.PATIENCE)
