"""One helper thread per process looks after other ranks while the main thread computes or waits: between steps too,
since a rank that has left a step may still be asked for the arguments it had in it."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from .timing import TIMING

LOOKS_PER_SECOND = 20_000  # of all ranks of a job: torch.distributed's store answers them with less than half a core
PATIENCE = 3.0  # seconds that the end of the process waits for the thread

_tasks: set[Callable[[], None]] = set()
_stop = threading.Event()
_thread: threading.Thread | None = None
_called_at: float | None = None  # since when it has been calling the tasks
_lock = threading.Lock()


def begin(task: Callable[[], None]) -> None:
    """Call a function every `TIMING.tick` seconds, in large jobs less often, until `end`."""
    global _thread
    with _lock:
        _tasks.add(task)
        if _thread is None:
            _thread = threading.Thread(target=_run, name="megapipe-watchdog", daemon=True)
            _thread.start()
            atexit.register(_stop_running)


def end(task: Callable[[], None]) -> None:
    _tasks.discard(task)


def interval(shortest: float) -> float:
    """Seconds from one look into the store to the next: in large jobs longer, since the store answers all ranks."""
    group = dist.group.WORLD  # read once: the main thread may shut torch.distributed down meanwhile
    return max(shortest, (1 if group is None else group.size()) / LOOKS_PER_SECOND)


def seconds_busy() -> float:
    """How long it has been calling the tasks: much longer than a moment, if the store does not answer."""
    called_at = _called_at
    return 0.0 if called_at is None else time.monotonic() - called_at


def _stop_running() -> None:
    """A thread that is inside the store when the interpreter goes brings the process down with it."""
    assert _thread is not None
    _stop.set()
    _thread.join(PATIENCE)


def _run() -> None:
    global _called_at
    while not _stop.wait(interval(TIMING.tick)):
        _called_at = time.monotonic()
        try:
            _call_tasks()
        finally:
            _called_at = None


def _call_tasks() -> None:
    """One look. A variable that outlived it would hold a session, and with it process groups that have ended."""
    for task in list(_tasks):
        task()
