"""The last steps of all ranks, recorded and gathered into one timeline."""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .. import parallel_state
from ..plan import Action, ActionBytes, RankStep, Span, Wait, plan_of
from ..timing import Clock, HostClock, LiveStorages, StepRecord, clock_of
from .clocks import align
from .timeline import Timeline

__all__ = ["TimelineRecorder"]


class RankRecord(NamedTuple):
    """The part of one rank in a timeline that is gathered."""

    clock: str
    name: str
    steps: dict[int, RankStep]
    """Steps by their number."""

    def as_lists(self) -> list[Any]:
        """The record as it travels."""
        steps = [[n, s.begin, s.end, s.spans, s.waits, s.pairs, s.memory] for n, s in self.steps.items()]
        return [self.clock, self.name, steps]

    @classmethod
    def read(cls, clock: str, name: str, steps: Sequence[Any]) -> RankRecord:
        """The record that was described by `as_lists`."""
        return cls(
            clock,
            name,
            {
                number: RankStep(
                    begin,
                    end,
                    [Span(Action(*action), *times) for action, *times in spans],
                    [Wait(action and Action(*action), *times) for action, *times in waits],
                    tuple(pairs),
                    tuple(ActionBytes(*held) for held in memory),
                )
                for number, begin, end, spans, waits, pairs, memory in steps
            },
        )


class TimelineRecorder:
    """Records the last training steps: set it as `config.record_timeline`, and `gather` or `save` when they are done.

    Args:
        num_steps: how many steps are kept. A step takes about 400 bytes for each action: 100 KB for 64 microbatches
            and two chunks, and as many CUDA events as that has starts and ends.
        memory: also count the bytes of tensors that are made in a step and still there, action by action. Every
            operation takes tens of microseconds longer meanwhile, so these are not the steps to take times from.

    Steps with `forward_only` are left out, unless the schedule never does anything else: their plan is another one.
    So are steps that failed. When the plan of the steps changes (another schedule, or number of microbatches), those
    before are forgotten.
    """

    def __init__(self, num_steps: int = 10, memory: bool = False) -> None:
        if num_steps < 1:
            raise ValueError(f"a timeline needs at least 1 step, got num_steps={num_steps}.")
        self._memory = memory
        self._records: deque[StepRecord] = deque(maxlen=num_steps)
        self._num_steps = 0
        self._clock: Clock = HostClock()

    def begin(self, name: str, device: torch.device) -> StepRecord:
        """A record for the step of the schedule `name` that is about to begin."""
        self._clock = clock_of(device)
        self._num_steps += 1
        return StepRecord(name, self._num_steps, self._clock, LiveStorages(device) if self._memory else None)

    def keep(self, record: StepRecord) -> None:
        """Keep the record of a step that has succeeded."""
        if self._records and not self._records[-1].has_same_plan(record):
            self._records.clear()
        self._records.append(record)

    def gather(self, group: dist.ProcessGroup | None = None) -> Timeline:
        """Gather the records of all ranks of the pipeline into one timeline, on one clock. Every rank calls it.

        Args:
            group: the pipeline's; None takes that of `parallel_state`.

        Raises:
            ValueError: no step was recorded on all ranks.
        """
        names = [record.name for record in self._records]
        steps = self._clock.read(self._records)
        own = RankRecord(_clock_name(), names[-1] if names else "", {r.number: s for r, s in zip(self._records, steps)})
        ranks = [own]
        if dist.is_initialized():
            group = group or parallel_state.get_pipeline_model_parallel_group()
            ranks = [RankRecord.read(*record) for record in parallel_state.all_gather_json(own.as_lists(), group)]
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
