"""For tests of optimizer steps that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megapipe import PostValidatedOptimizer
from megapipe.options.post_validation import _Recorded


@contextmanager
def counting_restarts() -> Iterator[list[Any]]:
    """Gives a list that grows by one whenever a step of this rank is run once more."""
    restarts: list[Any] = []
    stop = _Recorded.stop

    def count(self: _Recorded, again: bool) -> None:
        restarts.extend([self] * again)
        stop(self, again)

    _Recorded.stop = count
    try:
        yield restarts
    finally:
        _Recorded.stop = stop


def validated(optimizer: PostValidatedOptimizer, chunks: list[Any]) -> PostValidatedOptimizer:
    """The same, given to the config of the chunks."""
    chunks[0].config.post_validated_optimizer = optimizer
    return optimizer
