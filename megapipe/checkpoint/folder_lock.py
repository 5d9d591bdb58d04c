"""A run's folder belongs to one run at a time: to the process that a folder in it, made exclusively, names."""

from __future__ import annotations

import atexit
import os
import socket
import warnings
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote, unquote

_held: set[Path] = set()


def lock_folder(folder: Path) -> None:
    """Lock a folder, which exists, until this process ends; every time, check that it still is.

    A run that was killed leaves its lock. A later one removes it where that process is gone from this host, or where it
    was an earlier start of the same torchrun (by `--rdzv-id`), which ends all processes before it starts new ones.

    Raises:
        ValueError: where another run has it.
    """
    job = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    owner = (str(os.getpid()), quote(job, safe=""), quote(socket.gethostname(), safe=""))
    own = folder.resolve() / ",".join((".locked", *owner))
    if own not in _held:
        for other in own.parent.glob(".locked,*"):
            _remove_left(folder, other, own)
        own.mkdir()
        _held.add(own)
        atexit.register(_release, own)
    if [*own.parent.glob(".locked,*")] != [own]:
        raise ValueError(f"another run has locked {folder} too, or in place of this one: save to another folder.")


def _remove_left(folder: Path, other: Path, own: Path) -> None:
    """Raises ValueError where the owner of the lock is not gone."""
    (_, process, job, host), (_, _, own_job, own_host) = other.name.split(","), own.name.split(",")
    who = f"process {process} on {unquote(host)}"
    is_gone = not Path("/proc", process).exists() if host == own_host else job == own_job != "none"
    if not is_gone and other != own:  # an earlier process may have had this one's number
        raise ValueError(
            f"another run saves to {folder} ({who}): end that one, or save to another folder. If it has ended, remove "
            f"{other}."
        )
    warnings.warn(f"{folder} was locked by {who}, which is gone: this run goes on there.", stacklevel=2)
    with suppress(FileNotFoundError):  # another one has removed it
        other.rmdir()


def _release(own: Path) -> None:
    if int(own.name.split(",")[1]) == os.getpid():  # and no fork of it
        with suppress(OSError):
            own.rmdir()
