"""Short texts that the ranks of a pipeline leave for each other in the store."""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence

from torch.distributed import DistStoreError

from .board import join_ranks
from .errors import NoResponseError
from .store import InterruptibleStore
from .watchdog import Watchdog


class Mailbox:
    """Waits here end when a rank fails, and after `watchdog.timeout` seconds.

    Args:
        watchdog: polled after each wait, as a rank may have posted a text and then given up.
    """

    def __init__(self, store: InterruptibleStore, watchdog: Watchdog) -> None:
        self.pp_size = store.pp_size
        self._store = store
        self._rank = store.pp_rank
        self._watchdog = watchdog

    def post(self, name: str, text: str) -> None:
        """Leave a text for the other ranks to collect."""
        self._store.set(f"{name} {self._rank}", text)

    def withdraw(self, name: str) -> None:
        """Delete this rank's text, once no rank will ask for it."""
        self._store.delete_key(f"{name} {self._rank}")

    def find_all(self, name: str) -> list[str] | None:
        """The texts of all ranks, by rank, if they are there by now. Two requests, however many ranks there are."""
        keys = [f"{name} {rank}" for rank in range(self.pp_size)]
        return self._read(keys) if self._store.check(keys) else None

    def collect(self, name: str, reached: str | None = None, timeout: float | None = None) -> list[str]:
        """Wait for the texts of all ranks, and return them by rank.

        Args:
            reached: what the ranks have done when they post it, for the error where one does not.
            timeout: if it is shorter than the watchdog's.
        """
        return self._collect(name, range(self.pp_size), reached, timeout)

    def collect_from(self, rank: int, name: str) -> str:
        """Wait for that rank's text."""
        return self._collect(name, [rank])[0]

    def _collect(
        self, name: str, ranks: Sequence[int], reached: str | None = None, timeout: float | None = None
    ) -> list[str]:
        keys = [f"{name} {rank}" for rank in ranks]
        timeout = min(self._watchdog.timeout, timeout or math.inf)
        try:
            self._store.wait(keys, datetime.timedelta(seconds=timeout))
        except DistStoreError:
            missing = [rank for rank, key in zip(ranks, keys) if not self._store.check([key])]
            raise NoResponseError(
                f"rank {self._rank} {reached or f'came to the {name}'} and waited {timeout:g} s for "
                f"{join_ranks(missing)} to do so too"
            ) from None
        self._watchdog.poll()
        self._watchdog.check()
        return self._read(keys)

    def _read(self, keys: list[str]) -> list[str]:
        return [text.decode() for text in self._store.multi_get(keys)]
