"""Fingerprints of values that must be the same on every rank, so that rank 0's may be saved for all."""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..chunks import local
from ..training import OF_EACH_GROUP

__all__ = ["check_same", "fingerprint", "fingerprints_of"]

OWN = {*OF_EACH_GROUP, "_last_lr", "lr_lambdas"}
"""What a scheduler says of each parameter group: ranks have groups of their own, and `load_scheduler` minds that."""


def fingerprint(value: Any) -> int:
    """A checksum of a value."""
    number = 0
    for piece in _pieces(value):
        number = zlib.crc32(piece, number)
    return number


def fingerprints_of(others: dict[str, Any], extras: list[dict[str, Any]]) -> dict[str, int]:
    """Of all of which rank 0's is loaded on every rank."""
    values = {f"the state of others[{name!r}]": state for name, state in others.items()}
    for number, extra in enumerate(extras):
        values[f"what optimizer {number} has besides the state of its parameters"] = extra
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


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, Tensor):
        stream = io.BytesIO()
        torch.save(local(value).detach().cpu().clone(), stream)
        yield stream.getvalue()
    elif isinstance(value, Mapping):
        for key in sorted(value.keys() - OWN, key=repr):
            yield repr(key).encode()
            yield from _pieces(value[key])
        yield b"}"
    elif isinstance(value, (set, frozenset)):
        yield from _pieces(sorted(value, key=repr))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _pieces(item)
        yield b"]"
    else:
        yield re.sub(r" at 0x\w+", "", repr(value)).encode()  # without where in memory it is
