"""The last steps of all ranks, recorded and gathered into one timeline.

The clocks of several hosts are brought into line by the messages of the very steps that are to be compared. A message
cannot be used before it was sent. So each one says how far, at least, its receiver's clock is ahead of its sender's;
messages the other way say how far at most. Of all messages between two clocks the fastest ones count, as in the network
time protocol: half way between the two bounds the error is at most half the difference of their latencies. That needs
no exchange of its own, no quiet network, and no clock that keeps its rate from a calibration at the start of a run
until now. Every pipeline that trains sends messages both ways; where all go one way, the fastest is taken to have taken
no time. Ranks on one host share a clock: nothing is moved there.
"""

from __future__ import annotations

import math
import platform
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import parallel_state
from ..plan import Plan, RankStep, plan_of
from ..process_groups import all_gather_json
from ..timing import Clock, HostClock, LiveStorages, StepRecord, clock_of
from .timeline import Timeline, as_json, measured_messages, read_rank


class TimelineRecorder:
    """Records the last training steps: set it as `config.record_timeline`, and `gather` or `save` when they are done.

    Args:
        num_steps: how many steps are kept. A step takes about 400 bytes for each action: 100 KB for 64 microbatches
            and two chunks, and as many CUDA events as that has starts and ends.
        memory: also count the bytes of tensors that are made in a step and still there, for their peak. Every
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
        steps = self._clock.read(self._records)
        name = self._records[-1].name if self._records else ""
        own = [[record.number, as_json(step)] for record, step in zip(self._records, steps)]
        ranks: list[Any] = [[name, _clock_name(), own]]
        if dist.is_initialized():
            group = group or parallel_state.get_pipeline_model_parallel_group()
            ranks = all_gather_json(ranks[0], group)
        found = [{number: read_rank(step) for number, step in steps} for *_, steps in ranks]
        return merge(ranks[0][0], [clock for _, clock, _ in ranks], found)

    def save(self, path: str | Path, group: dist.ProcessGroup | None = None) -> Timeline:
        """`gather`, and write the timeline to a file on the first rank of the pipeline. Returns it on every rank."""
        timeline = self.gather(group)
        if not dist.is_initialized() or (group or parallel_state.get_pipeline_model_parallel_group()).rank() == 0:
            timeline.save(path)
        return timeline


def merge(name: str, clocks: Sequence[str], ranks: Sequence[Mapping[int, RankStep]]) -> Timeline:
    """One timeline of the steps that all ranks have, with the clocks in line, begun at 0.

    Args:
        clocks: the name of each rank's.
        ranks: the steps of each by their number.
    """
    numbers = sorted(set.intersection(*map(set, ranks)))
    if not numbers:
        raise ValueError("no training step was recorded: set config.record_timeline before the first one.")
    steps = [[rank[number] for rank in ranks] for number in numbers]
    plan = plan_of(name, [[span.action for span in rank.spans] for rank in steps[0]])
    steps = align(plan, steps, clocks)
    begin = min(rank.begin for rank in steps[0])
    return Timeline(name, [[rank.moved(-begin) for rank in step] for step in steps])


def align(plan: Plan, steps: Sequence[Sequence[RankStep]], clocks: Sequence[str]) -> list[list[RankStep]]:
    """The steps on the clock of rank 0.

    Args:
        steps: per step and rank, in milliseconds of the rank's own clock.
        clocks: the name of each rank's clock; ranks with the same name share one.
    """
    ahead = _bounds(plan, steps, clocks)
    offsets = {clocks[0]: 0.0}
    while len(offsets) < len(set(clocks)):
        # From what is known to the clock whose bounds are closest to each other.
        pairs = [(known, new) for known, new in ahead if known in offsets and new not in offsets]
        known, new = min(pairs, key=lambda pair: -ahead[pair] - ahead[pair[::-1]])
        least, most = ahead[known, new], -ahead[new, known]
        bounds = [bound for bound in (least, most) if math.isfinite(bound)]
        offsets[new] = offsets[known] + sum(bounds) / len(bounds)
    return [[rank.moved(offsets[clock]) for rank, clock in zip(step, clocks)] for step in steps]


def _bounds(plan: Plan, steps: Sequence[Sequence[RankStep]], clocks: Sequence[str]) -> dict[tuple[str, str], float]:
    """How much, for each pair of clocks that exchange messages, at least is to be added to the second one's times for
    no message to arrive before it was sent, if nothing is added to the first one's; -inf where none say so."""
    ahead: dict[tuple[str, str], float] = {}
    for step in steps:
        for message in measured_messages(plan, step):
            pair = clocks[message.sender], clocks[message.receiver]
            if pair[0] != pair[1]:
                ahead.setdefault(pair[::-1], -math.inf)
                ahead[pair] = max(ahead.get(pair, -math.inf), message.sent - message.received)
    return ahead


def _clock_name() -> str:
    """The same on all processes whose `perf_counter` is the same: it counts from when the machine was started."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()
