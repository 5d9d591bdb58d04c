"""One name on two stages: a tied parameter, or chunks that all count their layers from 0.

Tied parameters have the same value wherever they are; layers that were taken for one another do not. So names that
several stages use are found by gathering names, and told apart by sums over the bits of their values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..chunks import local
from .full_state import FullState

__all__ = ["Use", "check_tied", "checksums_of", "find_shared", "uses_of"]

Owner = tuple[int, ...]
"""(pipeline rank, chunk), the same for its replicas; (pipeline rank, chunk, rank) of what is no replica, such as a
rank's experts."""

Use = tuple[str, Owner, Any]
"""A name, who uses it, and what is to be compared: the shape or the sum."""


def uses_of(state: FullState, pp_rank: int, rank: int) -> list[Use]:
    return [(name, owner, tuple(tensor.shape)) for name, owner, tensor in _uses(state, pp_rank, rank)]


def find_shared(ranks: Iterable[list[Use]]) -> set[str]:
    """The names that several use. Raises ValueError where their shapes differ."""
    uses = [use for rank in ranks for use in rank]
    _check_same(uses, "shapes")
    first = {name: owner for name, owner, _ in reversed(uses)}
    return {name for name, owner, _ in uses if owner != first[name]}


def checksums_of(state: FullState, names: set[str], pp_rank: int, rank: int) -> list[Use]:
    uses = _uses(state, pp_rank, rank)
    return [(name, owner, _checksum(tensor)) for name, owner, tensor in uses if name in names]


def check_tied(ranks: Iterable[list[Use]]) -> None:
    """Raises ValueError where values differ. Those of shards and replicas are summed up over their ranks."""
    sums: dict[tuple[str, Owner], int] = {}
    for rank in ranks:
        for name, owner, value in rank:
            sums[name, owner] = (sums.get((name, owner), 0) + value) % 2**64
    _check_same([(name, owner, value) for (name, owner), value in sums.items()], "values")


def _uses(state: FullState, pp_rank: int, rank: int) -> Iterator[tuple[str, Owner, Tensor]]:
    for held, name, tensor in state.named_tensors():
        is_replica = getattr(held.value, "allreduce", True)  # Megatron's mark
        owner = (pp_rank, held.chunk) if is_replica else (pp_rank, held.chunk, rank)
        yield name, owner, tensor


def _check_same(uses: list[Use], what: str) -> None:
    first: dict[str, Use] = {}
    for name, owner, value in uses:
        _, other, expected = first.setdefault(name, (name, owner, value))
        if value != expected:
            raise ValueError(
                f"{name} is the name of different parameters, of {_where(other)} and of {_where(owner)}: their {what} "
                "differ. Name parameters as in the whole model, layers by their number there, or pass global_name (or "
                "parts, for experts that are distributed)."
            )


def _where(owner: Owner) -> str:
    where = f"chunk {owner[1]} on pipeline rank {owner[0]}"
    return where if len(owner) == 2 else f"{where} (rank {owner[2]})"


def _checksum(tensor: Tensor) -> int:
    return int(local(tensor).contiguous().flatten().view(torch.uint8).sum(dtype=torch.int64))
