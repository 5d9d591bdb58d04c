"""Writing down when a rank computes and when it waits, as it happens.

The times are those of whatever computes: the host's clock on CPU; on CUDA events in the stream, which are read only
when the records are gathered, so that nothing ever waits for the device. What a step costs for it is a tuple per
action and one per wait; what is kept is bounded by the number of steps.
"""

from __future__ import annotations

import functools
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from . import parallel_state
from .clocks import align
from .plan import plan_of
from .simulation import Span
from .timeline import RankStep, Timeline, Wait
from .verbs import Action

__all__ = ["StepRecord", "TimelineRecorder"]


class Clock(Protocol):
    """What tells the time on a device."""

    def now(self) -> Any:
        """A mark, put down without waiting for anything."""

    def elapsed(self, start: Any, end: Any) -> float:
        """Milliseconds between two marks. Waits until the second one was passed."""

    def read(self, records: Sequence[StepRecord]) -> list[RankStep]:
        """The records in milliseconds of the host's clock."""


class HostClock:
    """`time.perf_counter`, which all processes of a host share."""

    now = staticmethod(time.perf_counter)

    def elapsed(self, start: float, end: float) -> float:
        return 1000 * (end - start)

    def read(self, records: Sequence[StepRecord]) -> list[RankStep]:
        return [record.read(lambda mark: 1000 * mark) for record in records]


class CudaClock:
    """Events on the current stream. They are put on the host's clock by one more event, waited for when they are read:
    that is soon after the recorded steps, so the two clocks have no time to drift apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def elapsed(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        end.synchronize()
        return float(start.elapsed_time(end))

    def read(self, records: Sequence[StepRecord]) -> list[RankStep]:
        torch.cuda.synchronize(self._device)
        anchor = self.now()
        anchor.synchronize()
        host = 1000 * time.perf_counter()

        def time_of(first: torch.cuda.Event, mark: torch.cuda.Event) -> float:
            # Through the step's own first event: times between events are given in single precision.
            return float(host - first.elapsed_time(anchor) + first.elapsed_time(mark))

        return [record.read(functools.partial(time_of, record.begin)) for record in records]


@functools.cache
def clock_of(device: torch.device) -> Clock:
    """The clock of what computes there."""
    return CudaClock(device) if device.type == "cuda" else HostClock()


class StepRecord:
    """What one rank does in one step. Also the context around each of its actions: they do not nest."""

    __slots__ = (
        "_action",
        "_clock",
        "_inner",
        "_now",
        "_start",
        "begin",
        "end",
        "entries",
        "name",
        "number",
        "overlapped",
    )

    def __init__(self, name: str, number: int, clock: Clock) -> None:
        self.name = name
        self.number = number
        self._clock = clock
        self.entries: list[tuple[Action | None, bool, Any, Any]] = []
        """(action, whether it is the wait of that action, start, end)"""
        self.overlapped: set[Action] = set()
        """Those of overlapped pairs: of such a pair only the sum of the two times means anything."""
        self._now = clock.now
        self._action: Action | None = None
        self.begin: Any = clock.now()
        self.end: Any = self.begin

    def during(self, action: Action, inner: AbstractContextManager[Any]) -> StepRecord:
        """The context around an action, with another one in it."""
        self._action = action
        self._inner = inner
        return self

    def __enter__(self) -> None:
        self._start = self._now()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self.entries.append((self._action, False, self._start, self._now()))
        self._action = None

    def now(self) -> Any:
        return self._now()

    def waited(self, since: Any) -> None:
        """A wait is over. An action that it happened in starts only now; outside any it is the step's last."""
        self._start = now = self._now()
        self.entries.append((self._action, True, since, now))

    def finish(self) -> None:
        """The step has succeeded."""
        self.end = self._now()

    def durations(self) -> Iterator[tuple[Action, float]]:
        """Each action with its time in milliseconds, but for overlapped pairs."""
        for action, is_wait, start, end in self.entries:
            if action is not None and not is_wait and action not in self.overlapped:
                yield action, self._clock.elapsed(start, end)

    def duration(self) -> float:
        """Of the whole step, in milliseconds."""
        return self._clock.elapsed(self.begin, self.end)

    def has_same_plan(self, other: StepRecord) -> bool:
        actions, others = ([entry[0] for entry in record.entries] for record in (self, other))
        return self.name == other.name and actions == others

    def read(self, time_of: Callable[[Any], float]) -> RankStep:
        """In milliseconds of the host's clock."""
        return RankStep(
            time_of(self.begin),
            time_of(self.end),
            [
                Span(action, time_of(start), time_of(end))
                for action, is_wait, start, end in self.entries
                if not is_wait and action is not None
            ],
            [Wait(action, time_of(start), time_of(end)) for action, is_wait, start, end in self.entries if is_wait],
        )


class RankRecord(NamedTuple):
    """What a rank tells the others when records are gathered."""

    clock: str
    name: str
    steps: dict[int, RankStep]
    """By their number."""


class TimelineRecorder:
    """Records the last training steps: set it as `config.record_timeline`, and `gather` or `save` when they are done.

    Args:
        num_steps: how many steps are kept. A step takes about 400 bytes for each action: 100 KB for 64 microbatches
            and two chunks, and as many CUDA events as that has starts and ends.

    Steps with `forward_only` are left out, unless the schedule never does anything else: their plan is another one.
    So are steps that failed. When the plan of the steps changes (another schedule, or number of microbatches), those
    before are forgotten.
    """

    def __init__(self, num_steps: int = 10) -> None:
        if num_steps < 1:
            raise ValueError(f"a timeline needs at least 1 step, got num_steps={num_steps}.")
        self._records: deque[StepRecord] = deque(maxlen=num_steps)
        self._num_steps = 0
        self._clock: Clock = HostClock()

    def begin(self, name: str, device: torch.device) -> StepRecord:
        """A record for the step of the schedule `name` that is about to begin."""
        self._clock = clock_of(device)
        self._num_steps += 1
        return StepRecord(name, self._num_steps, self._clock)

    def keep(self, record: StepRecord) -> None:
        """The step has succeeded."""
        if self._records and not self._records[-1].has_same_plan(record):
            self._records.clear()
        self._records.append(record)

    def gather(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """The records of all ranks of the pipeline as one timeline, on one clock. Every rank calls it.

        Args:
            group: the pipeline's; None takes that of `parallel_state`.

        Raises ValueError where no step was recorded on all ranks.
        """
        names = [record.name for record in self._records]
        steps = self._clock.read(self._records)
        own = RankRecord(_clock_name(), names[-1] if names else "", {r.number: s for r, s in zip(self._records, steps)})
        ranks = [own]
        if dist.is_initialized():
            group = group or parallel_state.get_pipeline_model_parallel_group()
            ranks = [own] * group.size()
            dist.all_gather_object(ranks, own, group)
        return merge(ranks)

    def save(self, path: str | Path, group: dist.ProcessGroup | None = None) -> Timeline:
        """`gather`, and write the timeline to a file on the first rank of the pipeline. Returns it on every rank."""
        timeline = self.gather(group)
        if not dist.is_initialized() or (group or parallel_state.get_pipeline_model_parallel_group()).rank() == 0:
            timeline.save(path)
        return timeline


def merge(ranks: Sequence[RankRecord]) -> Timeline:
    """One timeline of the steps that all ranks have, with the clocks in line, begun at 0."""
    numbers = sorted(set.intersection(*(set(rank.steps) for rank in ranks)))
    if not numbers:
        raise ValueError("no training step was recorded: set config.record_timeline before the first one.")
    steps = [[rank.steps[number] for rank in ranks] for number in numbers]
    name = ranks[0].name
    plan = plan_of(name, [[span.action for span in rank.spans] for rank in steps[0]])
    steps = align(plan, steps, [rank.clock for rank in ranks])
    begin = min(rank.begin for rank in steps[0])
    return Timeline(name, [[rank.moved(-begin) for rank in step] for step in steps])


def _clock_name() -> str:
    """The same on all processes whose `perf_counter` is the same: it counts from when the machine was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
