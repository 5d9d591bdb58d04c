"""A step's batch cut into microbatches, of which each rank reads only what its stages need.

Only the first stage needs inputs and only the last one labels. With V placement that is the same rank, in two chunks;
most ranks need neither and never ask for a batch, unless every stage is called with a keyword from it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..plan import StageInfo


def split_batch(batch: Any, num_microbatches: int, spec: Any = 0, *, uneven: bool = False) -> list[Any]:
    """Cut the tensors of a batch into `num_microbatches` pieces, as views.

    Args:
        batch: a tensor, or dicts, lists and tuples of tensors, nested as you like. Numbers, strings and the like go
            into every microbatch.
        spec: the dimension that counts samples; None puts the whole tensor into every microbatch. One for all tensors,
            or a tree like the batch, or like its upper levels: {"tokens": 1, "mask": None}.
        uneven: whether the first microbatches may have one sample more than the others.

    Returns:
        The microbatches, each a tree like the batch.

    Raises:
        ValueError: where the spec does not fit, tensors have different numbers of samples, or the samples cannot be
            divided evenly.
    """
    if num_microbatches < 1:
        raise ValueError(f"a batch cannot be cut into {num_microbatches} microbatches: use 1 or more.")
    entries, tree = pytree.tree_flatten_with_path(batch)
    dims = pytree._broadcast_to_and_flatten(spec, tree)
    if dims is None:
        raise ValueError(
            f"the spec {spec} does not fit the batch {pytree.tree_map(_describe, batch)}: give it its keys."
        )
    named = [(pytree.keystr(path), value, dim) for (path, value), dim in zip(entries, dims)]
    _check(named, num_microbatches, uneven)
    pieces = [
        value.tensor_split(num_microbatches, dim) if _is_cut(value, dim) else [value] * num_microbatches
        for _, value, dim in named
    ]
    return [pytree.tree_unflatten(list(leaves), tree) for leaves in zip(*pieces)] or [batch] * num_microbatches


def data_iterators(
    batches: Iterable[Mapping[str, Any]],
    num_microbatches: int,
    stages: Sequence[StageInfo],
    *,
    inputs: Sequence[str],
    labels: Sequence[str],
    keywords: Sequence[str] = (),
    spec: Any = 0,
    uneven: bool = False,
) -> list[Iterator[dict[str, Any]] | None]:
    """The `data_iterator` for all steps: one iterator over microbatches for each of the rank's chunks.

    The first stage's yields dicts with the `inputs`, the last one's with the `labels`, and every one's with the
    `keywords`; where there are none of these, the others are None. Of a batch only the names needed on this rank are
    looked up, so a mapping that reads when asked reads no more; on ranks that need none `batches` is not even begun.

    Args:
        batches: of this replica, one per step.
        num_microbatches, uneven: see `split_batch`.
        stages: the rank's, as `stages_for_rank` returns them.
        inputs, labels: names in each batch.
        keywords: names of what the modules of all stages are called with, such as a mask: `chunk(x, mask=mask)`.
        spec: a dimension for all, or by name.

    Returns:
        The iterators, or None for a chunk that needs no data.

    Raises:
        ValueError: where the spec lacks a name; by the iterators, where a batch lacks a name or does not fit.
    """
    wanted = [
        list(dict.fromkeys([*(inputs if stage.is_first else ()), *(labels if stage.is_last else ()), *keywords]))
        for stage in stages
    ]
    names = list(dict.fromkeys(itertools.chain(*wanted)))
    if isinstance(spec, Mapping) and (missing := [name for name in names if name not in spec]):
        raise ValueError(
            f"the spec {dict(spec)} has no {missing[0]!r}: give it every name of inputs, labels and keywords."
        )
    specs = {name: spec[name] for name in names} if isinstance(spec, Mapping) else spec

    source: list[Iterator[Mapping[str, Any]]] = []

    def read() -> list[dict[str, Any]]:
        if not source:  # which may begin to read
            source.append(iter(batches))
        batch = next(source[0])
        return split_batch({name: _look_up(batch, name) for name in names}, num_microbatches, specs, uneven=uneven)

    left: list[deque[dict[str, Any]]] = []
    return [_Microbatches(read, left, own) if own else None for own in wanted]


class _Microbatches(Iterator[dict[str, Any]]):
    """The part of each microbatch that one chunk needs. The two ends of a V go through one batch before either goes on
    to the next.

    Args:
        read: the microbatches of the next batch.
        everyone: what is left of the batch for each end.
    """

    def __init__(
        self, read: Callable[[], list[dict[str, Any]]], everyone: list[deque[dict[str, Any]]], names: Sequence[str]
    ) -> None:
        self._read, self._everyone, self._names = read, everyone, names
        self._left: deque[dict[str, Any]] = deque()
        everyone.append(self._left)

    def __next__(self) -> dict[str, Any]:
        if not self._left:
            if any(self._everyone):
                raise ValueError(
                    "the last step failed within its batch, of which the two ends of the pipeline have taken different "
                    "parts: make new data_iterators."
                )
            microbatches = self._read()
            for left in self._everyone:
                left.extend(microbatches)
        microbatch = self._left.popleft()
        return {name: microbatch[name] for name in self._names}


def _look_up(batch: Mapping[str, Any], name: str) -> Any:
    try:
        return batch[name]
    except KeyError:
        raise ValueError(
            f"the batch has no {name!r}, only {list(batch)}: name what it has as inputs, labels or keywords."
        ) from None


def _is_cut(value: Any, dim: int | None) -> bool:
    return isinstance(value, Tensor) and dim is not None


def _check(named: Sequence[tuple[str, Any, int | None]], num_microbatches: int, uneven: bool) -> None:
    first: tuple[str, int] | None = None
    for name, value, dim in named:
        if not isinstance(value, Tensor) and dim is not None and _has_samples(value):
            raise ValueError(
                f"batch{name} is a {type(value).__name__}, which cannot be cut: make it a tensor, or a dict, list or "
                "tuple of tensors, or say None in the spec to have all of it in every microbatch."
            )
        if not _is_cut(value, dim):
            continue
        if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
            raise ValueError(
                f"batch{name} has shape {list(value.shape)}, so dimension {dim} of it cannot count samples: name "
                "another one in the spec, or None to have it in every microbatch."
            )
        num_samples = value.shape[dim]
        first = first or (name, num_samples)
        if num_samples != first[1]:
            raise ValueError(
                f"batch{first[0]} has {first[1]} samples and batch{name} has {num_samples} (dimension {dim} of "
                f"{list(value.shape)}): name another dimension in the spec, or None to have it in every microbatch."
            )
        if num_samples < num_microbatches or (num_samples % num_microbatches and not uneven):
            raise ValueError(
                f"the {num_samples} samples of batch{name} cannot be divided evenly into {num_microbatches} "
                f"microbatches: use a multiple of {num_microbatches}"
                + (", or uneven=True." if num_samples > num_microbatches and not uneven else ".")
            )


def _has_samples(value: Any) -> bool:
    """Whether it is an array, or a container that is not one to torch's pytrees."""
    return bool(getattr(value, "shape", ())) or isinstance(value, Mapping) or dataclasses.is_dataclass(value)


def _describe(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else type(value).__name__
