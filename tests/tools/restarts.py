"""For tests of optimizer steps that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megapipe import PostValidatedOptimizer
from megapipe.runtime.rollback import Speculation


@contextmanager
def counting_restarts() -> Iterator[list[Speculation]]:
    """Gives a list that grows by one whenever a step of this rank begins again."""
    restarts: list[Speculation] = []
    roll_back = Speculation.roll_back

    def count(self: Speculation) -> None:
        restarts.append(self)
        roll_back(self)

    Speculation.roll_back = count
    try:
        yield restarts
    finally:
        Speculation.roll_back = roll_back


def validated(optimizer: PostValidatedOptimizer, chunks: list[Any]) -> PostValidatedOptimizer:
    """The same, given to the config of the chunks."""
    chunks[0].config.post_validated_optimizer = optimizer
    return optimizer
