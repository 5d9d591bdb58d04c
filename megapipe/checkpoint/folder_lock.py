"""A run's folder belongs to one run at a time.

The lock is the operating system's, on a file in the folder: it ends with the process that holds it, however that ends
and on whichever host, so that nothing is left for a restart to wait for. Processes forked from it do not inherit it.
"""

from __future__ import annotations

import errno
import os
import socket
import time
import warnings
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

__all__ = ["FolderLock", "lock_folder"]

NAME = ".lock"
PATIENCE = 30.0  # seconds for which a process that is being killed, perhaps on another host, may still hold the lock


class FolderLock:
    """Held from when it is made until it is forgotten.

    Attributes:
        is_held: False where the file system has no locks: then there may be other runs.
    """

    def __init__(self, folder: Path) -> None:
        file = os.open(folder / NAME, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self.is_held = _take(file, folder)
        except BaseException:
            os.close(file)
            raise
        weakref.finalize(self, os.close, file)


def _take(file: int, folder: Path) -> bool:
    since = time.monotonic()
    while True:
        try:
            if fcntl is None:
                raise OSError(errno.ENOSYS, "this system has no locks")
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                warnings.warn(
                    f"{folder} cannot be locked ({error}): see to it yourself that no other run saves to it.",
                    stacklevel=2,
                )
                return False
        if time.monotonic() - since > PATIENCE:
            owner = os.pread(file, 200, 0).decode(errors="replace") or "unknown"
            raise ValueError(f"another run saves to {folder} ({owner}): end that one, or save to another folder.")
        time.sleep(0.05)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}, {time.strftime('since %F %T')}".encode(), 0)
    return True


_held: weakref.WeakValueDictionary[tuple[Path, int], FolderLock] = weakref.WeakValueDictionary()
"""By folder and process: closing a second lock's file would end the first, as the system counts by process."""


def lock_folder(folder: Path) -> FolderLock:
    """The lock of a folder, which exists; the same one for all who ask in this process.

    Raises:
        ValueError: where another process holds it.
    """
    key = folder.resolve(), os.getpid()
    lock = _held.get(key)
    if lock is None:
        _held[key] = lock = FolderLock(folder)
    return lock
