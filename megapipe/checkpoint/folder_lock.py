"""A run's folder belongs to one run at a time: to the process that has the only folder in `.locked`, with its name.

A process that ends removes it. One that was killed leaves it, and a later run takes it over by renaming it, which
succeeds for one run only: where that process is gone from this host, or where it was an earlier start of the same
torchrun (by `--rdzv-id`), which ends all processes before it starts new ones.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
import warnings
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

__all__ = ["lock_folder"]

_held: set[Path] = set()


def lock_folder(folder: Path) -> None:
    """Lock a folder, which exists, until this process ends; every time, check that it still is.

    Raises:
        ValueError: where another run has it.
    """
    lock = folder.resolve() / ".locked"
    own = lock / _name()
    if own not in _held:
        lock.mkdir(exist_ok=True)
        try:
            others = list(lock.iterdir())
            if others:
                _check_left(folder, others[0], own)
                others[0].rename(own)
            else:
                own.mkdir()
        except FileNotFoundError:  # it was released or taken over meanwhile
            return lock_folder(folder)
        _held.add(own)
        atexit.register(_release, own)
    if [*lock.glob("*")] != [own]:
        raise ValueError(f"another run has locked {folder} too, or in place of this one: save to another folder.")


def _name() -> str:
    """A name of this process in all the world: a later one may have its number, and containers share the names of
    hosts."""
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    job = "" if job == "none" else f"{zlib.crc32(job.encode()):08x}"  # one that was given no id is like no other
    numbers = os.path.realpath("/proc/self/ns/pid").rpartition("/")[2]  # within which process ids are unique
    return f"{os.getpid()},{_start_of(os.getpid())},{job},{quote(f'{socket.gethostname()} {numbers}', safe='')}"


def _start_of(process: int | str) -> str:
    """When it began, where the system tells it; "gone" where it has ended."""
    try:
        state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if state in "ZX" else fields[18]


def _check_left(folder: Path, other: Path, own: Path) -> None:
    """Warns where the owner of the lock is gone, and raises ValueError otherwise."""
    process, start, job, host = other.name.split(",")
    *_, own_job, own_host = own.name.split(",")
    who = f"process {process} on {unquote(host).split()[0]}"
    if (job and job == own_job) if host != own_host else _start_of(process) != start:
        warnings.warn(f"{folder} was locked by {who}, which is gone: this run goes on there.", stacklevel=2)
        return
    since = time.strftime("%F %T", time.localtime(other.stat().st_ctime))
    raise ValueError(
        f"another run saves to {folder} ({who}, since {since}): end that one, or save to another folder. If it has "
        f"ended, remove {other.parent}."
    )


def _release(own: Path) -> None:
    if int(own.name.split(",")[0]) == os.getpid():  # and no fork of it
        with suppress(OSError):
            own.rmdir()
            own.parent.rmdir()
