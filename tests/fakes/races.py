"""Tells of operations on one piece of memory, one of which writes, that nothing puts in an order, whatever came first
in this run: torch's sanitizer of streams is told what the host puts on them. Captured graphs count where they are
captured, and not where they are replayed."""

from __future__ import annotations

import threading
import traceback
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

from torch.cuda import _sanitizer
from torch.cuda._sanitizer import DEFAULT_STREAM_ID, Access, EventHandler

__all__ = ["Races"]


def _extract(frames: Iterator[tuple[Any, int]], lookup_lines: bool) -> traceback.StackSummary:
    """The whole stack of each launch, and to look whether its files are as they were, takes longer than what is
    launched."""
    nearest = [(frame.f_code.co_filename, line, frame.f_code.co_name, "") for frame, line in islice(frames, 13)]
    return traceback.StackSummary.from_list(nearest)


_sanitizer.traceback = SimpleNamespace(StackSummary=SimpleNamespace(extract=_extract), walk_stack=traceback.walk_stack)


class Races:
    def __init__(self) -> None:
        self._lock = threading.RLock()
        self.restart()

    def restart(self) -> None:
        self.found: list[str] = []
        self._handler = EventHandler()

    def launch(self, stream: Any, reads: Iterable[Any], writes: Iterable[Any], what: Any) -> None:
        """`stream`: None for the host, on which all that is launched later depends."""
        number = DEFAULT_STREAM_ID if stream is None else stream.number
        written = {*writes}
        arguments: Any = {*reads} - written, written, set(), str(what), defaultdict(list)
        with self._lock:
            self.found += map(str, self._handler._handle_kernel_launch(number, *arguments))
            if stream is None:
                self._handler._handle_stream_synchronization(number)

    def record(self, moment: Any, stream: Any) -> None:
        """Called in the midst of any other, too, as memory is freed."""
        with self._lock:
            if stream.number in self._handler.syncs.current_sync_states:  # otherwise nothing has been put there
                self._handler._handle_event_record(id(moment), stream.number)

    def wait(self, moment: Any, stream: Any) -> None:
        with self._lock:
            self._handler._handle_event_wait(id(moment), stream.number)

    def wait_on_host(self, moment: Any) -> None:
        with self._lock:
            self._handler._handle_event_synchronization(id(moment))

    def give_again(self, block: Any, moments: Iterable[Any]) -> None:
        """The allocator has seen these moments: it puts what came before them in front of all new uses of the block."""
        with self._lock:
            used = self._handler.tensors_accessed.accesses.get(block)
            for seen in (self._handler.syncs.recorded_sync_states.get(id(moment), {}) for moment in moments):
                if used is not None:
                    used.reads = [one for one in used.reads if _is_later(one, seen)]
                    used.write = used.write if used.write is not None and _is_later(used.write, seen) else None


def _is_later(access: Access, seen: dict[int, int]) -> bool:
    return access.seq_num > seen.get(access.stream, -1)
