"""The asynchronous device's memory, given out as torch's caching allocator does.

Memory that is freed can be had again at once by the stream that it was given to, whose operations run in order. Where
it was recorded on other streams (`record_stream`), it can be had again once the host has seen, at a later allocation,
that these have come to the point at which it was freed. Whatever is still to be read from it is then ruined: it becomes
NaN. Where memory is short (`limit`), what the device has not given out yet is taken once it has nothing left to do, and
all that is free has been given back to it.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

from fakes.races import Races

__all__ = ["Allocation", "CachingAllocator"]


class Block:
    """Memory of the device, given out again and again."""

    __slots__ = ("cell", "num_bytes", "stream")

    def __init__(self, num_bytes: int, stream: Any) -> None:
        self.num_bytes, self.stream = num_bytes, stream
        self.cell: Any = lambda: None
        """A weak reference to the numbers in it: they live while something is still to read them."""


class Allocation:
    """A block for as long as a tensor, or a view of it, is alive on the host."""

    __slots__ = ("__weakref__", "_allocator", "block", "used_by")

    def __init__(self, block: Block, allocator: CachingAllocator) -> None:
        self.block, self._allocator = block, allocator
        self.used_by: set[Any] = set()
        """Other streams that it was recorded on."""

    def __del__(self) -> None:
        self._allocator.free(self)


class CachingAllocator:
    limit = math.inf
    """Bytes that the device gives out before memory is short. Tests may not free as much: then it gives out more."""

    def __init__(self, races: Races, wait_for_device: Callable[[], None]) -> None:
        self._races, self._wait_for_device = races, wait_for_device
        self.reserved = 0
        """Bytes that the device has given out."""
        self.peak = 0
        """Most bytes that tensors had at a time."""
        self._in_use: dict[int, int] = {}
        self._freed: deque[tuple[Block, list[threading.Event]]] = deque()
        self._free: defaultdict[tuple[Any, int], list[Block]] = defaultdict(list)
        self._lock = threading.Lock()

    @property
    def allocated(self) -> int:
        """Bytes that tensors have now."""
        return sum(list(self._in_use.values()))

    def allocate(self, num_bytes: int, stream: Any, cell: Any) -> Allocation:
        num_bytes = -(-num_bytes // 512) * 512
        with self._lock:
            self._take_back()
            blocks = self._free[stream, num_bytes]
            if blocks and stream.capture is None:  # while a graph is captured, it has memory of its own
                block = blocks.pop()
                before = block.cell()
                if before is not None:
                    stream.put(partial(_ruin, before))
                del before
            else:
                if self.reserved + num_bytes > self.limit and stream.capture is None:
                    self._wait_for_device()
                    self._take_back()
                    self.reserved -= sum(block.num_bytes for blocks in self._free.values() for block in blocks)
                    self._free.clear()
                block = Block(num_bytes, stream)
                self.reserved += num_bytes
            block.cell = weakref.ref(cell)
            self._in_use[id(block)] = num_bytes
            self.peak = max(self.peak, self.allocated)
        return Allocation(block, self)

    def free(self, allocation: Allocation) -> None:
        """Called from any thread, also in the middle of `allocate`, and so without its lock."""
        block, streams = allocation.block, {allocation.block.stream, *allocation.used_by}
        self._in_use.pop(id(block), None)
        if all(stream.capture is None for stream in streams):
            self._freed.append((block, [stream.record() for stream in allocation.used_by - {block.stream}]))

    def _take_back(self) -> None:
        for _ in range(len(self._freed)):
            block, events = self._freed.popleft()
            if all(event.is_set() for event in events):
                self._races.give_again(block, events)
                self._free[block.stream, block.num_bytes].append(block)
            else:
                self._freed.append((block, events))


def _ruin(cell: Any) -> None:
    if cell.cpu.is_floating_point() or cell.cpu.is_complex():
        cell.cpu.fill_(float("nan"))
    else:
        cell.cpu.fill_(1)
