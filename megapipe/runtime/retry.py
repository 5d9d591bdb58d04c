"""A fresh start after a failed step: every rank begins the next one with the same batch and the same weights.

A step fails in different places on different ranks: one has read its batch, another has not; one has made an optimizer
step more than another. The ranks compare these counts when a new session begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..stages import StepArguments
from .session import Session

__all__ = ["leave_batch", "start_together"]


def start_together(step: StepArguments, session: Session) -> None:
    """At the first training step of a session, and at its first validation: go on from the furthest batch that any rank
    has reached, and roll back an optimizer step that not all ranks have made. Collective over the pipeline."""
    iterators = _readers(step.data_iterators)
    optimizer = step.config.post_validated_optimizer
    num_gathers = 0 if optimizer is None else optimizer.num_gathers
    own = (max((iterator.next_batch for iterator in iterators), default=0), num_gathers)
    everybody = session.exchange_once(f"progress, {'validation' if step.forward_only else 'training'}", own)
    if everybody is None:
        return
    next_batch, num_gathers = (max(values) for values in zip(*everybody))
    for iterator in iterators:
        iterator.skip_to(next_batch)
    if optimizer is not None:
        optimizer.catch_up(num_gathers)


def leave_batch(data_iterators: Sequence[Any]) -> None:
    """After a failed step: skip the rest of its batch."""
    iterators = _readers(data_iterators)
    next_batch = max((iterator.next_batch for iterator in iterators), default=0)
    for iterator in iterators:
        iterator.skip_to(next_batch)


def _readers(data_iterators: Sequence[Any]) -> list[Any]:
    """Those that count batches, as those of `megapipe.training.data_iterators` do."""
    return [one for one in data_iterators if hasattr(one, "next_batch") and hasattr(one, "skip_to")]
