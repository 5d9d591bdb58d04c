"""Ranks that do something together, as saving: an error on one is the same error on all, so that none waits for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from .failures import collective, text_of
from .process_groups import all_gather_json


class Phase:
    """What ranks tell each other at the end of what they do.

    Attributes:
        own: what this rank tells, which JSON can hold.
        all: what each has told, by rank, once all have.
    """

    own: Any = None
    all: list[Any]


class AllRanks:
    """All ranks of torch.distributed; this process alone where that is not in use.

    Every rank makes one, and calls its methods in the same order. A group that is made for them ends by `close`.

    Args:
        what: they do, for those who ask where a rank is.
        group: of all of them; None makes one for them, over gloo.
    """

    def __init__(self, what: str, group: dist.ProcessGroup | None = None) -> None:
        self.what = what
        self._owns_group = group is None
        self.group = dist.new_group(backend="gloo") if group is None and dist.is_initialized() else group
        self.rank = 0 if self.group is None else self.group.rank()
        self.num_ranks = 1 if self.group is None else self.group.size()

    def close(self) -> None:
        """End the group that was made: its threads and connections. No rank is in a phase any more."""
        group, self.group = self.group, None
        if self._owns_group and group is not None and dist.is_initialized() and group in _world.pg_map:
            dist.destroy_process_group(group)

    @contextmanager
    def together(self) -> Iterator[Phase]:
        """Around a phase. Behind it every rank has what all have told, or raises what the first of those that failed in
        it has raised. One exchange."""
        phase, own, text = Phase(), None, ""
        try:
            yield phase
            text = json.dumps(phase.own)
        except Exception as error:
            if self.group is None:
                raise
            own = error
        told: list[Any] = [[None if own is None else [type(own).__module__, type(own).__name__, text_of(own)], text]]
        if self.group is not None:
            with collective(self.what):
                told = all_gather_json(told[0], self.group)
        if errors := [error for error, _ in told if error is not None]:
            raise _error(*errors[0]) from own
        phase.all = [json.loads(text) for _, text in told]


def _error(module: str, name: str, text: str) -> Exception:
    """The same error where it is Python's or megapipe's own, or one with the same text."""
    kind = getattr(sys.modules.get(module), name, None) if module.split(".")[0] in ("builtins", "megapipe") else None
    if isinstance(kind, type) and issubclass(kind, Exception) and name != "StopIteration":  # which no context may raise
        try:
            return kind(text)
        except TypeError:  # it takes other arguments
            pass
    return RuntimeError(f"{name}: {text}")
