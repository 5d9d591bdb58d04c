"""The whole model's tensors, from the ranks that hold them to those that ask for them: by name, bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import parallel_state
from .all_ranks import AllRanks
from .failures import collective
from .safetensors_files import Entry

WHAT = "the sending of weights"
BUCKET = 2**28
"""Bytes that are sent at once."""


class ChunkTensors(NamedTuple):
    """What one chunk has of the model."""

    stage: int
    num_stages: int
    entries: list[Entry]
    tensors: Callable[[], Iterator[tuple[str, Tensor]]]
    """Makes them one after the other, in the order of `entries`. All replicas of the stage call it alike, as its shards
    are gathered there."""


class Bucket(NamedTuple):
    stage: int
    source: int
    """The rank that holds the stage, among all."""
    entries: list[Entry]


def send_out(
    describe: Callable[[], list[ChunkTensors]],
    device: torch.device,
    to: int | Sequence[int] | None,
    dtype: torch.dtype | None,
    bucket_size: int,
) -> Iterator[tuple[str, Tensor]]:
    """The names and tensors of all stages, on the ranks `to`; nothing on others, which take part. See `named_weights`.

    Args:
        describe: the parts of this rank's chunks. Its errors are raised on all ranks.
    """
    ranks = AllRanks(WHAT, dist.group.WORLD)
    group = parallel_state.find_pipeline_group()
    members = [0] if group is None else dist.get_process_group_ranks(group)
    readers = range(ranks.num_ranks) if to is None else [to] if isinstance(to, int) else list(to)
    with ranks.together() as phase:
        if bucket_size < 1:
            raise ValueError(f"bucket_size={bucket_size} sends nothing: give the bytes of a bucket.")
        if strange := [one for one in readers if one not in range(ranks.num_ranks)]:
            raise ValueError(f"to={to} names rank {strange[0]}, but there are {ranks.num_ranks}.")
        parts = describe()
        own = [[part.stage, part.num_stages, [[e.name, str(e.dtype), e.shape] for e in part.entries]] for part in parts]
        phase.own = own, list(readers), str(dtype), bucket_size
    with ranks.together():
        if any(one[1:] != phase.all[0][1:] for one in phase.all):
            raise ValueError("ranks call named_weights with different arguments: give all of them the same.")
        stages = sorted((stage, member, *of) for member in members for stage, *of in phase.all[member][0])
        buckets = list(_buckets(entries_of("named_weights", stages, dtype), bucket_size))
    outlet = _Outlet(ranks, group, {part.stage: part.tensors for part in parts}, device)
    outlet.sends, outlet.reads = not set(members).isdisjoint(readers), ranks.rank in readers
    return outlet.run(buckets)


def entries_of(
    caller: str, stages: Sequence[Any], dtype: torch.dtype | None = None
) -> Iterator[tuple[int, int, Entry]]:
    """Each tensor with its stage and its rank. One that several stages have comes from the first of them.

    Args:
        caller: the function that users have called.
        stages: the number, the rank, how many stages there are, and the tensors by texts and numbers of each.
        dtype: of numbers with a point. None leaves it.

    Raises:
        ValueError: where stages are missing.
    """
    numbers, num_stages = [stage[0] for stage in stages], stages[0][2] if stages else 1
    if numbers != list(range(num_stages)):
        raise ValueError(
            f"{caller} needs each of {num_stages} stages once, and was given {numbers}: pass all chunks of each rank."
        )
    known = set()
    for stage, member, _, entries in stages:
        for entry in (Entry.read(*one) for one in entries):
            if entry.name not in known:
                known.add(entry.name)
                own = entry.dtype if dtype is None or not entry.dtype.is_floating_point else dtype
                yield stage, member, entry._replace(dtype=own)


def _buckets(entries: Iterator[tuple[int, int, Entry]], size: int) -> Iterator[Bucket]:
    """Tensors of one stage, together at most of `size` bytes; or one tensor."""
    bucket, filled = Bucket(-1, -1, []), 0
    for stage, source, entry in entries:
        if bucket.entries and (stage != bucket.stage or filled + entry.num_bytes > size):
            yield bucket
            bucket, filled = Bucket(stage, source, []), 0
        bucket = bucket._replace(stage=stage, source=source)
        bucket.entries.append(entry)
        filled += entry.num_bytes
    if bucket.entries:
        yield bucket


class _Outlet:
    """
    Args:
        tensors: what makes those of this rank's stages.

    Attributes:
        sends: whether any rank of this pipeline reads.
        reads: whether this rank does.
    """

    sends = reads = True

    def __init__(self, ranks: AllRanks, group: Any, tensors: dict[int, Any], device: torch.device) -> None:
        self._ranks, self._group, self._tensors, self._device = ranks, group, tensors, device
        self._made: dict[int, Iterator[tuple[str, Tensor]]] = {}

    def run(self, buckets: Sequence[Bucket]) -> Iterator[tuple[str, Tensor]]:
        num_read, total = 0, sum(len(bucket.entries) for bucket in buckets)
        size = max((sum(entry.num_bytes for entry in bucket.entries) for bucket in buckets), default=0)
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            for bucket in buckets:
                self._agree()
                views = self._views_of(bucket.entries)
                with self._ranks.together():
                    if bucket.stage in self._tensors:
                        self._fill(bucket.stage, views)
                self._send(bucket)
                for name, view in views.items():
                    num_read += 1
                    if self.reads:
                        yield name, view.clone()
            self._agree()
        except GeneratorExit:
            with suppress(Exception), self._ranks.together():
                raise RuntimeError(
                    f"rank {self._ranks.rank} stopped reading weights behind {num_read} of {total}: go on to the end "
                    "on every rank, and look there for its own error."
                ) from None
            raise

    def _agree(self) -> None:
        """All ranks go on, or all raise what one has raised."""
        with self._ranks.together():
            pass

    def _views_of(self, entries: Sequence[Entry]) -> dict[str, Tensor]:
        """Where the tensors of a bucket are in the buffer."""
        places, end = {}, 0
        for entry in sorted(entries, key=lambda entry: -entry.dtype.itemsize):  # so that all are aligned
            places[entry.name] = end
            end += entry.num_bytes
        self._end = end
        parts = [(entry, self._buffer[places[entry.name] :][: entry.num_bytes]) for entry in entries]
        return {entry.name: part.view(entry.dtype).view(entry.shape) for entry, part in parts}

    def _fill(self, stage: int, views: dict[str, Tensor]) -> None:
        """Make the tensors of this rank that are in the bucket. What an earlier stage has given is passed over."""
        made = self._made.setdefault(stage, self._tensors[stage]())
        left = set(views)
        while left:
            name, tensor = next(made)
            if name in left:
                views[name].copy_(tensor)
                left.remove(name)
            del tensor

    def _send(self, bucket: Bucket) -> None:
        if self._group is not None and self._group.size() > 1 and self.sends:
            with collective(WHAT):
                dist.broadcast(self._buffer[: self._end], bucket.source, self._group)
