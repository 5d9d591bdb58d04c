"""For tests of optimizer steps that are rolled back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megapipe import PostValidatedOptimizer
from megapipe.options.post_validation import PostValidation


@contextmanager
def counting_restarts() -> Iterator[list[PostValidation]]:
    """Gives a list that grows by one whenever a step of this rank begins again."""
    restarts: list[PostValidation] = []
    again = PostValidation.again

    def count(self: PostValidation, *args: Any) -> None:
        restarts.append(self)
        again(self, *args)

    PostValidation.again = count
    try:
        yield restarts
    finally:
        PostValidation.again = again


def validated(optimizer: PostValidatedOptimizer, chunks: list[Any]) -> PostValidatedOptimizer:
    """The same, given to the config of the chunks."""
    chunks[0].config.post_validated_optimizer = optimizer
    return optimizer
