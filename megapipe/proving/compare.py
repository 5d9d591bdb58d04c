"""What every rank has to say, against the whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from .names import Place
from .proof import Difference, Proof
from .reference import WholeStep
from .trial import Evidence


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


def difference(
    found: Any, want: Any, tolerance: float = 0.0, of: float | None = None
) -> tuple[float, float, str] | None:
    """Tell by how much it is off, of how much, and a word where these are no numbers. None where it is the same.

    Args:
        of: what the tolerance is a part of; None takes the largest value of each tensor.
    """
    (own, shape), (others, other_shape) = tree_flatten(found), tree_flatten(want)
    if shape != other_shape:
        return inf, inf, f"{found}, and {want} in the whole model"
    found_ones = (_of_leaves(one, other, tolerance, of) for one, other in zip(own, others))
    return next((differs for differs in found_ones if differs is not None), None)


def _of_leaves(found: Any, want: Any, tolerance: float, of: float | None) -> tuple[float, float, str] | None:
    if isinstance(found, (int, float, Tensor)) and isinstance(want, (int, float, Tensor)):
        return _of_tensors(torch.as_tensor(found), torch.as_tensor(want).detach().cpu(), tolerance, of)
    if (found is None) != (want is None):
        other = want if found is None else found
        if isinstance(other, Tensor) and not other.any():
            return None  # no gradient, or one of zeros
        return inf, inf, "missing" if found is None else "there, and none in the whole model"
    if isinstance(found, str) and found != want:
        return inf, inf, f"{found}, and {want} in the whole model"
    return None


def _of_tensors(found: Tensor, want: Tensor, tolerance: float, of: float | None) -> tuple[float, float, str] | None:
    if found.shape != want.shape:
        return inf, inf, f"of shape {list(found.shape)}, and {list(want.shape)} in the whole model"
    if (found.dtype == want.dtype and torch.equal(found, want)) or not found.numel():
        return None
    found, want = found.detach().double(), want.double()
    largest = want.abs().max().item()
    limit = tolerance * (largest if of is None else of)
    if torch.allclose(found, want, rtol=0, atol=limit if isfinite(limit) else 0.0, equal_nan=True):
        return None
    return (found - want).abs().max().item(), largest, ""
