"""Checks that ranks save and load the same values: those that only rank 0 saves, and all with the same name.

One name on two stages is a tied parameter, or both count their layers from 0. Tied parameters have the same value
wherever they are; layers that were taken for one another do not. So names that several stages use are found by
gathering names, and told apart by sums over the bits of their values.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import parallel_state
from ..chunks import local
from ..training import OF_EACH_GROUP
from .full_state import FullState, is_extra_state

OWN = {*OF_EACH_GROUP, "_last_lr", "lr_lambdas"}
"""What a scheduler says of each parameter group: ranks have groups of their own, and `load_scheduler` minds that."""

Uses = Iterable[Sequence[Any]]
"""Names with who uses them, and what is to be compared: the shape or the sum."""


def check_steps(steps: Sequence[int]) -> None:
    """Raises ValueError if ranks save different steps."""
    for rank, step in enumerate(steps):
        if step != steps[0]:
            raise ValueError(f"rank 0 saves step {steps[0]} and rank {rank} step {step}: save the same one on all.")


def check_one_checkpoint(path: Path, checksums: Sequence[int]) -> None:
    """Raises ValueError if ranks load different checkpoints: a path may lead each node to a disk of its own."""
    for rank, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ValueError(
                f"{path} on rank {rank} is another checkpoint than on rank 0: give a folder that all ranks can reach."
            )


def fingerprint(value: Any) -> int:
    """A checksum of a value."""
    return zlib.crc32(repr(_plain(value)).encode())


def fingerprints_of(others: Mapping[str, Any], extras: Sequence[Any]) -> dict[str, int]:
    """Digests of all of which rank 0's is loaded on every rank."""
    values = {f"the state of others[{name!r}]": state for name, state in others.items()}
    what = "what optimizer {} has besides the state of its parameters"
    values |= {what.format(number): extra for number, extra in enumerate(extras)}
    return {name: fingerprint(value) for name, value in values.items()}


def check_same(ranks: Sequence[Mapping[str, int]]) -> None:
    """Raises ValueError where the fingerprints under one name differ."""
    for rank, fingerprints in enumerate(ranks):
        for name, number in fingerprints.items():
            if ranks[0].get(name) != number:
                raise ValueError(
                    f"{name} differs between rank 0 and rank {rank}, and rank 0's would be loaded on every rank: leave "
                    "out what each rank has for itself, and give averages of the weights a Checkpointer and a folder "
                    "of their own, as chunks."
                )


def _plain(value: Any) -> Any:
    """Returns an object whose `repr` is the same if and only if the values are the same."""
    if isinstance(value, Tensor):
        return value.dtype, *value.shape, zlib.crc32(_bytes_of(value).cpu().numpy().data)
    if isinstance(value, Mapping):
        return {repr(key): _plain(value[key]) for key in sorted(value.keys() - OWN, key=repr)}
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return re.sub(r" at 0x\w+", "", repr(value))  # without where in memory it is


def uses_of(state: FullState, rank: int, names: set[str] | None = None) -> list[tuple[str, str, Any]]:
    """Names, each with who uses it and the shape; of `names`, with the sum over the bits."""
    uses: list[tuple[str, str, Any]] = []
    pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    for held, name, tensor in state.named_tensors():
        user = f"chunk {held.chunk} on pipeline rank {pp_rank}"
        if not getattr(held.value, "allreduce", True):  # Megatron's mark of what is no replica, as a rank's experts
            user += f" (rank {rank})"
        if names is None:
            uses.append((name, user, list(tensor.shape)))
        elif name in names:
            uses.append((name, user, int(_bytes_of(tensor).sum(dtype=torch.int64))))
    for held in state.held:
        if is_extra_state(held) and (names is None or held.name in names):
            user = f"chunk {held.chunk} on pipeline rank {pp_rank}"
            uses.append((held.name, user, [] if names is None else fingerprint(held.value)))
    return uses


def find_shared(uses: Uses, what: str = "shapes") -> set[str]:
    """The names that several use. Raises ValueError where what is compared differs."""
    first: dict[str, Sequence[Any]] = {}
    shared = set()
    for use in uses:
        name, user, value = use
        _, other, expected = first.setdefault(name, use)
        if value != expected:
            raise ValueError(
                f"{name} is the name of different parameters, of {other} and of {user}: their {what} differ. Name "
                "parameters as in the whole model, layers by their number there, or pass global_name (or parts, for "
                "experts that are distributed)."
            )
        if user != other:
            shared.add(name)
    return shared


def check_tied(uses: Uses) -> None:
    """Raises ValueError where sums differ. Those of shards and replicas are summed up over their ranks."""
    sums: dict[tuple[str, str], int] = {}
    for name, user, value in uses:
        sums[name, user] = sums.get((name, user), 0) + value
    find_shared([(*use, value) for use, value in sums.items()], "values")


def _bytes_of(tensor: Tensor) -> Tensor:
    return local(tensor).detach().contiguous().flatten().view(torch.uint8)
