"""For tests of optimizer steps that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megapipe import PostValidatedOptimizer
from megapipe.options.post_validation import Speculation


@contextmanager
def counting_restarts() -> Iterator[list[Speculation]]:
    """Gives a list that grows by one whenever a step of this rank begins again."""
    restarts: list[Speculation] = []
    begin_again = Speculation.begin_again

    def count(self: Speculation, *args: Any) -> None:
        restarts.append(self)
        begin_again(self, *args)

    Speculation.begin_again = count
    try:
        yield restarts
    finally:
        Speculation.begin_again = begin_again


def validated(optimizer: PostValidatedOptimizer, chunks: list[Any]) -> PostValidatedOptimizer:
    """The same, given to the config of the chunks."""
    chunks[0].config.post_validated_optimizer = optimizer
    return optimizer
