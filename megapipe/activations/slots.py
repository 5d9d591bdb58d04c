"""The slot of the forward under way: a number that no other unit in flight on its chunk has. So what the forward saves
for its backward may lie in memory that is used again for the next unit of the slot."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["current_slot", "in_slot"]

_current: int | None = None


def current_slot() -> int | None:
    """None where there is none to be used."""
    return _current


@contextmanager
def in_slot(number: int) -> Iterator[None]:
    global _current
    before, _current = _current, number
    try:
        yield
    finally:
        _current = before
