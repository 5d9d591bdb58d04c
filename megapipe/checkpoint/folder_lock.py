"""A run's folder belongs to one run at a time: to the process that has the only folder in `.locked`, with its name."""

from __future__ import annotations

import atexit
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

__all__ = ["lock_folder"]

_held: set[Path] = set()


def lock_folder(folder: Path) -> None:
    """Lock a folder, which exists, until this process ends; every time, check that it still is.

    A run that was killed leaves its lock. A later one takes it over where that process is gone from this host, or where
    it was an earlier start of the same torchrun (by `--rdzv-id`), which ends all processes before it starts new ones.

    Raises:
        ValueError: where another run has it.
    """
    lock = folder.resolve() / ".locked"
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    own = lock / ",".join((str(os.getpid()), quote(job, safe=""), quote(socket.gethostname(), safe="")))
    if own not in _held:
        lock.mkdir(exist_ok=True)
        if others := list(lock.iterdir()):
            _check_left(folder, others[0], own)
            with suppress(FileNotFoundError):  # one of two takes it over
                others[0].rename(own)
        else:
            own.mkdir()
        _held.add(own)
        atexit.register(_release, own)
    if [*lock.glob("*")] != [own]:
        raise ValueError(f"another run has locked {folder} too, or in place of this one: save to another folder.")


def _check_left(folder: Path, other: Path, own: Path) -> None:
    """Warns where the owner of the lock is gone, and raises ValueError otherwise."""
    (process, job, host), (_, own_job, own_host) = other.name.split(","), own.name.split(",")
    who = f"process {process} on {unquote(host)}"
    is_gone = not Path("/proc", process).exists() if host == own_host else job == own_job != "none"
    if not is_gone and other != own:  # an earlier process may have had this one's number
        raise ValueError(
            f"another run saves to {folder} ({who}): end that one, or save to another folder. If it has ended, remove "
            f"{other.parent}."
        )
    warnings.warn(f"{folder} was locked by {who}, which is gone: this run goes on there.", stacklevel=2)


def _release(own: Path) -> None:
    if int(own.name.split(",")[0]) == os.getpid():  # and no fork of it
        with suppress(OSError):
            own.rmdir()
            own.parent.rmdir()
