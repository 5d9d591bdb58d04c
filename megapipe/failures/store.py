"""The ranks' part of the store that torch.distributed was set up with.

A wait in it ends when the job fails, also that of a transport that looks for its peers here: torch's own waits end
only when their time is up, and until then they block all other threads that use the store.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import Store

from . import helper_thread

TIMEOUT = datetime.timedelta(minutes=5)  # as in torch's own stores
PAUSE = 0.05  # seconds, at most, between two looks of a rank that waits; in large jobs more

_lock = threading.RLock()  # not every store may be used by two threads at once


class StoreGoneError(DistNetworkError):
    """The connection to the store is closed."""


class InterruptibleStore(Store):
    """A store that all ranks of a pipeline share, and no other process. May be used by several threads.

    Args:
        store: where its keys are kept.
        pp_rank, pp_size: this rank's number in the pipeline, and how many there are.
        check_failure: called during waits; raises where a rank has failed.
    """

    def __init__(self, store: Store, pp_rank: int, pp_size: int, check_failure: Callable[[], None]) -> None:
        super().__init__()
        self.pp_rank = pp_rank
        self.pp_size = pp_size
        self._store = store
        self._check_failure = check_failure
        self._longest_pause = helper_thread.interval(PAUSE)
        self._lost: str | None = None  # why the connection was closed

    def set(self, key: str, value: Any) -> None:
        with self._open() as store:
            store.set(key, value)

    def add(self, key: str, amount: int) -> int:
        with self._open() as store:
            return store.add(key, amount)

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        with self._open() as store:
            return store.compare_set(key, expected, desired)

    def check(self, keys: list[str]) -> bool:
        with self._open() as store:
            return bool(store.check(keys))

    def delete_key(self, key: str) -> bool:
        with self._open() as store:
            return store.delete_key(key)

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._open() as store:
            return store.get(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that are there: one request, however many they are."""
        with self._open() as store:
            reads_many = store.has_extended_api()  # type: ignore[attr-defined]
            return store.multi_get(keys) if reads_many else [store.get(key) for key in keys]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        end = time.monotonic() + (timeout or TIMEOUT).total_seconds()
        pause = 0.0005
        while not self.check(keys):
            self._check_failure()
            if time.monotonic() > end:
                raise DistStoreError(f"no rank has put {', '.join(keys)} into the store in time.")
            time.sleep(pause)
            pause = min(2 * pause, self._longest_pause)

    @contextmanager
    def _open(self) -> Iterator[Store]:
        with _lock:
            if self._lost is not None:  # torch does not connect again, and logs its own stack for each request
                raise StoreGoneError(self._lost)
            try:
                yield self._store
            except DistNetworkError as error:
                reason = str(error).partition("\n")[0]
                self._lost = (
                    f"torch.distributed's store is gone ({reason}): the process that held it, torchrun or a rank, was "
                    "killed or has ended, or its host is gone."
                )
                raise StoreGoneError(self._lost) from None
