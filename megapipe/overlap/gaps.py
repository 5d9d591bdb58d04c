"""The gap between the start of a communication in a backward and the wait for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..weight_grad import one_backward_at_a_time

__all__ = ["fill_gap", "filling_gaps"]

_gap: Callable[[], object] | None = None  # seen from autograd's threads, as a thread-local would not be


@contextmanager
def filling_gaps(advance: Callable[[], object]) -> Iterator[None]:
    """Around one backward: `advance` is called in each of its gaps."""
    global _gap
    with one_backward_at_a_time:
        before, _gap = _gap, advance
        try:
            yield
        finally:
            _gap = before


def fill_gap() -> None:
    """What is run in a gap may have a backward in it, whose gaps are not for itself to fill."""
    global _gap
    gap, _gap = _gap, None
    if gap is None:
        return
    try:
        gap()
    finally:
        _gap = gap
