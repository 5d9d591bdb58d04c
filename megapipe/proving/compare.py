"""What every rank has to say, against the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .names import Place
from .proof import Difference, Proof
from .trial import Evidence
from .whole import WholeStep


def compare(
    everybody: Sequence[Evidence],
    wanted: Sequence[WholeStep],
    key_of: Mapping[Place, str],
    tolerance: float,
    proof: Proof,
) -> None:
    """Note in the proof what is the same and what is not.

    Args:
        key_of: what the whole model calls the tensor of a place.
        tolerance: by how much numbers may be off, over the largest of their tensor.
    """
    for number, want in enumerate(wanted):
        for one in everybody:
            found = one.steps[number]
            kinds: dict[str, list[tuple[str, int | None, Any, Any]]] = {"loss": []}
            if found.reports:
                pairs = enumerate(zip_longest(found.reports, want.reports[one.replica]))
                kinds["loss"] = [(f"of microbatch {k}", None, *pair) for k, pair in pairs]
            for kind in ("gradient", "weight", "buffer"):
                own, others = getattr(found, f"{kind}s"), getattr(want, f"{kind}s")
                if kind != "buffer" or one.replica == 0:
                    kinds[kind] = [(name, stage, t, others[key_of[stage, name]]) for (stage, name), t in own.items()]
            for kind, rows in kinds.items():
                off = [
                    Difference(number, kind, name, one.rank, stage, *differs)
                    for name, stage, value, other in rows
                    if (differs := difference(value, other, tolerance)) is not None
                ]
                same, total = proof.same.get(kind, (0, 0))
                proof.same[kind] = same + len(rows) - len(off), total + len(rows)
                proof.differences += off


def difference(found: Any, want: Any, tolerance: float) -> tuple[float, float, str] | None:
    """Tell by how much it is off, of how much, and a word where these are no numbers. None where it is the same."""
    if found is None or want is None:
        if found is want:
            return None
        other = want if found is None else found
        if isinstance(other, Tensor) and not other.any():
            return None  # no gradient, or one of zeros
        return (inf, inf, "missing" if found is None else "there, and none in the whole model")
    if isinstance(found, Tensor) and isinstance(want, Tensor):
        return _of_tensors(found, want.detach().cpu(), tolerance)
    (own, shape), (others, other_shape) = tree_flatten(found), tree_flatten(want)
    if shape != other_shape:
        return inf, inf, f"{found}, and {want} in the whole model"
    for one, other in zip(own, others):
        if isinstance(one, (int, float, Tensor)) and isinstance(other, (int, float, Tensor)):
            differs = _of_tensors(torch.as_tensor(one), torch.as_tensor(other).detach().cpu(), tolerance)
            if differs is not None:
                return differs
    return None


def _of_tensors(found: Tensor, want: Tensor, tolerance: float) -> tuple[float, float, str] | None:
    if found.shape != want.shape:
        return inf, inf, f"of shape {list(found.shape)}, and {list(want.shape)} in the whole model"
    if found.dtype == want.dtype and torch.equal(found, want):
        return None
    if not found.numel():
        return None
    by, of = (found.double() - want.double()).abs().max().item(), want.double().abs().max().item()
    if by <= tolerance * of or (by != by and torch.allclose(found, want, rtol=0, atol=0, equal_nan=True)):
        return None
    return by, of, ""
