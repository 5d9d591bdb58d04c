"""The record of one step on one rank: when it computes and when it waits. All times are in milliseconds.

They are those of the device that computes: the host's clock on CPU; on CUDA events in the stream, which are read only
when the records are gathered, so that nothing ever waits for the device. A record costs a tuple per action and one per
wait.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..plan import KINDS, Action, RankStep, Span, Wait
from .storages import LiveStorages


class RecordedEvent:
    """An event that has been recorded. When this is dropped, the event is recorded anew for somebody else."""

    __slots__ = ("_unused", "event")

    def __init__(self, event: Any, unused: list[Any]) -> None:
        self.event = event
        """torch.cuda.Event"""
        self._unused = unused

    def query(self) -> bool:
        """Whether the device has come to it."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Wait until the device has come to it."""
        self.event.synchronize()

    def __del__(self) -> None:
        self._unused.append(self.event)


class CudaEvents:
    """Events on the current streams of one device, used again: a message takes up to three, and an action of a recorded
    step up to four.

    Args:
        options: of `torch.cuda.Event`.
    """

    def __init__(self, device: torch.device, **options: Any) -> None:
        self._device = device
        self._options = options
        self._unused: list[Any] = []  # filled from any thread

    def record(self) -> RecordedEvent:
        """Mark this point of the current stream."""
        try:
            event = self._unused.pop()
        except IndexError:
            event = torch.cuda.Event(**self._options)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return RecordedEvent(event, self._unused)


class HostClock:
    """`time.perf_counter`, which all processes of a host share."""

    now = staticmethod(time.perf_counter)
    """Puts down a mark, without waiting for anything."""

    def elapsed(self, start: float, end: float) -> float:
        """Milliseconds between two marks. Waits until the second one was passed."""
        return 1000 * (end - start)

    def read(self, records: Sequence[StepRecord]) -> list[RankStep]:
        """The records in milliseconds of the host's clock."""
        return [record.read(lambda mark: 1000 * mark) for record in records]


class CudaClock:
    """Events on the current stream. They are put on the host's clock by one more event, waited for when they are read:
    that is soon after the recorded steps, so the two clocks have no time to drift apart. Where the host is behind, an
    action lasts on the device from its first kernel to its last, the gaps between them included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.now = CudaEvents(device, enable_timing=True).record

    def elapsed(self, start: RecordedEvent, end: RecordedEvent) -> float:
        end.synchronize()
        return _between(start, end)

    def read(self, records: Sequence[StepRecord]) -> list[RankStep]:
        torch.cuda.synchronize(self._device)
        anchor, host = self._anchor()

        def time_of(first: RecordedEvent, mark: RecordedEvent) -> float:
            # Through the step's own first event: times between events are given in single precision.
            return host - _between(first, anchor) + _between(first, mark)

        return [record.read(functools.partial(time_of, record.begin)) for record in records]

    def _anchor(self) -> tuple[RecordedEvent, float]:
        """An event, and when the host's clock showed that it was passed. The host is told of it 10 to 100 us late: the
        least late of ten is taken."""
        tries = []
        for _ in range(10):
            mark = self.now()
            mark.synchronize()
            tries.append((mark, 1000 * time.perf_counter()))
        first = tries[0][0]
        return min(tries, key=lambda one: one[1] - _between(first, one[0]))


def _between(start: RecordedEvent, end: RecordedEvent) -> float:
    return float(start.event.elapsed_time(end.event))


Clock = HostClock | CudaClock
"""Tells the time on a device."""


@functools.cache
def clock_of(device: torch.device) -> Clock:
    """The clock of computations on `device`."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class StepRecord:
    """The actions and waits of one rank in one step. Also the context around each action: they do not nest."""

    def __init__(self, name: str, number: int, clock: Clock, storages: LiveStorages | None = None) -> None:
        self.storages = nullcontext() if storages is None else storages
        """The context around the step."""
        self.name = name
        self.number = number
        self.entries: list[tuple[Action | None, bool, Any, Any]] = []
        """(action, whether it is the wait of that action, start, end)"""
        self.overlapped: set[Action] = set()
        """Those of overlapped pairs: of such a pair only the sum of the two times means anything."""
        self.now = clock.now
        self._action: Action | None = None
        self.begin: Any = clock.now()
        self.end: Any = self.begin

    def during(self, action: Action, inner: AbstractContextManager[Any]) -> StepRecord:
        """The context around an action, with another one in it."""
        self._action = action
        self._inner = inner
        return self

    def __enter__(self) -> None:
        self._start = self.now()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self.entries.append((self._action, False, self._start, self.now()))
        self._action = None

    def waited(self, since: Any) -> None:
        """A wait is over. An action that it happened in starts only now; outside any it is the step's last."""
        self._start = now = self.now()
        self.entries.append((self._action, True, since, now))

    def finish(self) -> None:
        """The step has succeeded."""
        self.end = self.now()

    def has_same_plan(self, other: StepRecord) -> bool:
        actions, others = ([entry[0] for entry in record.entries] for record in (self, other))
        return self.name == other.name and actions == others and self.overlapped == other.overlapped

    def read(self, time_of: Callable[[Any], float]) -> RankStep:
        """The step in milliseconds of the host's clock."""
        spans = [
            Span(action, time_of(start), time_of(end))
            for action, is_wait, start, end in self.entries
            if not is_wait and action is not None
        ]
        return RankStep(
            time_of(self.begin),
            time_of(self.end),
            spans,
            [Wait(action, time_of(start), time_of(end)) for action, is_wait, start, end in self.entries if is_wait],
            tuple(at for at, span in enumerate(spans) if span.action in self.overlapped and _is_forward(span.action)),
            self.storages.peak if isinstance(self.storages, LiveStorages) else 0,
        )


def _is_forward(action: Action) -> bool:
    return KINDS[action.kind].is_forward
