"""For tests of optimizer steps that are taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from megapipe.runtime.rollback import Speculation


@contextmanager
def counting_restarts() -> Iterator[list[Speculation]]:
    """Gives a list that grows by one whenever a step of this rank begins again."""
    restarts: list[Speculation] = []
    begin_again = Speculation.begin_again

    def count(self: Speculation) -> None:
        restarts.append(self)
        begin_again(self)

    Speculation.begin_again = count
    try:
        yield restarts
    finally:
        Speculation.begin_again = begin_again
