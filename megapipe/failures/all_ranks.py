"""Ranks that do something together, as saving: an error on one is the same error on all, so that none waits for it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from .watchdog import collective

__all__ = ["AllRanks"]

T = TypeVar("T")


class AllRanks:
    """All ranks of torch.distributed; this process alone where that is not in use.

    Every rank makes one, and calls its methods in the same order.

    Args:
        what: they do, for those who ask where a rank is.
        group: of all of them; None makes one for them, over gloo.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None = None) -> None:
        self.what = what
        self.group = dist.new_group(backend="gloo") if group is None and dist.is_initialized() else group
        self.rank = 0 if self.group is None else self.group.rank()
        self.num_ranks = 1 if self.group is None else self.group.size()

    @contextmanager
    def same_errors(self) -> Iterator[None]:
        """At the end of the block every rank raises what the first of those that failed in it has raised."""
        own = None
        try:
            yield
        except Exception as error:
            own = _sendable(error)
        failed = [error for error in self._gather(own) if error is not None]
        first = self.broadcast(failed[0] if failed else None)
        if first is not None:
            raise first

    def gather(self, value: T) -> list[T]:
        """On rank 0 the values of all ranks, elsewhere an empty list.

        Raises:
            TypeError: on every rank, where a value cannot be sent.
        """
        with self.same_errors():
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"what is to be saved cannot be sent to the other ranks ({error}): keep numbers, strings, lists, "
                    "dicts and tensors in the optimizer's groups and state."
                ) from None
        return self._gather(value)

    def broadcast(self, value: T, source: int = 0) -> T:
        """One rank's value, on all ranks."""
        values = [value]
        if self.group is not None:
            with collective(self.what):
                dist.broadcast_object_list(values, src=source, group=self.group)
        return values[0]

    def _gather(self, value: Any) -> list[Any]:
        values = [value] * self.num_ranks if self.rank == 0 else []
        if self.group is not None:
            with collective(self.what):
                dist.gather_object(value, values or None, dst=0, group=self.group)
        return values


def _sendable(error: Exception) -> Exception:
    """The same error, or one with the same text that can be sent: all ranks must hear of it."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
