"""A measured timeline: what every rank of a pipeline did in some training steps, and what follows from it.

The records come from a `TimelineRecorder` (recorder.py). Here they are plain numbers, in milliseconds and on one
clock, so that they can be drawn and compared as simulated plans are.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean, median, median_low
from typing import Any, NamedTuple

from ..plan import (
    KINDS,
    RECOMPUTE,
    Action,
    Costs,
    Event,
    Plan,
    RankStep,
    Simulation,
    Span,
    Wait,
    parse_json,
    place_weights,
    plan_of,
    read_text,
    simulate,
)

UNEVEN = 0.8
"""The least speed of a rank beside the fastest that may be chance."""


class MeasuredMessage(NamedTuple):
    """A message between two ranks, with times in milliseconds on one clock."""

    sender: int
    sent: float
    """The end of the sender's last action before the send."""
    receiver: int
    received: float
    """The start of the action that needed it."""
    awaited: float
    """When the receiver began to wait for it."""


@dataclass(frozen=True)
class Timeline:
    """Some training steps of one pipeline, all with the same plan.

    Attributes:
        name: of the schedule.
        steps: what each rank did, per step and rank, in milliseconds on one clock.
    """

    name: str
    steps: list[list[RankStep]]

    @cached_property
    def plan(self) -> Plan:
        """The plan of every step."""
        ranks = self.steps[0]
        return plan_of(
            self.name, [[span.action for span in rank.spans] for rank in ranks], [rank.pairs for rank in ranks]
        )

    @cached_property
    def typical_step(self) -> list[RankStep]:
        """The step of median length. Its first action starts at 0 ms, and waits before that are cut off."""
        durations = [step_time(step) for step in self.steps]
        step = self.steps[durations.index(median_low(durations))]
        moved = [rank.moved(-first_start(step)) for rank in step]
        return [
            replace(rank, waits=[Wait(action, max(0.0, start), end) for action, start, end in rank.waits if end > 0])
            for rank in moved
        ]

    @cached_property
    def mean_times(self) -> dict[str, list[float]]:
        """Per kind of action (F, BW, B, W) the mean time on each stage, in ms; 0 on stages without that kind. Where
        sequences are cut, it is that of one slice."""
        times: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
        for rank in (rank for step in self.steps for rank in step):
            for action, start, end in rank.spans:
                times[action.kind, action.stage].append(end - start)
        num_stages = self.plan.pp_size * self.plan.num_chunks
        return {
            kind: [fmean(times.get((kind, stage), [0.0])) for stage in range(num_stages)]
            for kind in KINDS
            if any(kind == found for found, _ in times)
        }

    @cached_property
    def latency(self) -> float:
        """The latency of a message in ms, from the end of the action that made it to the start of the one that needs
        it: the median of the messages that their receiver waited for before they were sent. 0 without such messages."""
        waited_for = [
            message.received - message.sent
            for step in self.steps
            for message in measured_messages(self.plan, step)
            if message.awaited < message.sent
        ]
        return max(0.0, median(waited_for)) if waited_for else 0.0

    def costs(self) -> Costs:
        """The mean times of each stage, of each slice beside the others, and the latency, in ms. Where backwards were
        measured only as a whole (BW), half of each counts as B and half as W."""
        forward, inputs, weights = map(self._times_of, ("forward", "backward_input", "backward_weight"))
        recompute = self._times_of("recompute") if RECOMPUTE.name in self.mean_times else None
        return Costs(forward, inputs, weights, self.latency, slices=self._mean_slices, recompute=recompute)

    def _times_of(self, cost: str) -> list[float]:
        """The times of each stage: of the kind of action that has this cost alone, else its even share in another
        kind's."""
        kinds = [kind for kind in KINDS.values() if cost in kind.costs and kind.name in self.mean_times]
        shares = [
            [self.plan.num_slices * mean / len(kind.costs) for mean in self.mean_times[kind.name]]
            for kind in sorted(kinds, key=lambda kind: len(kind.costs))
        ]
        nothing = [0.0] * self.plan.pp_size * self.plan.num_chunks
        return [next(filter(None, times), 0.0) for times in zip(*shares, nothing)]

    def tuned_plan(self, max_in_flight: float | None = None) -> Plan:
        """The measured plan with its weight-gradient passes (W) where these times make a step shortest; the plan itself
        where they are well placed. The same on all ranks that have gathered the timeline, so it can be run at once:
        `get_forward_backward_func(timeline.tuned_plan())`.

        Args:
            max_in_flight: most microbatches of a whole rank that a rank may hold, from F to W; or more, where the
                order of its Fs and Bs holds more. None for a quarter of the number of ranks more than was measured.
        """
        return place_weights(self.plan, self.costs(), max_in_flight)

    @cached_property
    def _work(self) -> list[float]:
        """The time of a microbatch on each stage, in ms."""
        costs = self.costs()
        parts = (costs.forward, costs.backward_input, costs.backward_weight)
        return [sum(of_stage) for of_stage in zip(*(part for part in parts if isinstance(part, list)))]

    def speeds(self, num_layers: Sequence[int] | None = None) -> list[float]:
        """How fast each rank is, beside the fastest one: for `distribute_layers` and `layer_costs`.

        Without `num_layers` all work of a rank counts, its share of the embedding and the head included. With it, the
        time per layer does, of stages between the first and the last, as if all layers cost alike. A rank with none
        of these stages counts as fast as the nearest one that has some.

        Args:
            num_layers: of each stage, as it was measured.

        Raises:
            ValueError: as `layer_costs`.
        """
        plan, times = self.plan, self._work
        stages = range(len(times))
        if num_layers is not None:
            if len(num_layers) != len(times) or not sum(num_layers[1:-1]):
                raise ValueError(
                    f"num_layers must be {len(times)} numbers, one for each measured stage, with layers between the "
                    f"first and the last, got {list(num_layers)}: measure with at least 3 stages (pipeline ranks times "
                    "chunks)."
                )
            stages = range(1, len(times) - 1)
        counts = num_layers or [1] * len(times)
        per_layer = {}
        for rank in range(plan.pp_size):
            own = [stage for stage in stages if plan.rank_of(stage) == rank and counts[stage]]
            if own:
                layers = sum(counts[stage] for stage in own) if num_layers else 1
                per_layer[rank] = sum(times[stage] for stage in own) / layers
        near = [per_layer[min(per_layer, key=lambda other: abs(other - rank))] for rank in range(plan.pp_size)]
        return [min(near) / time for time in near]

    def layer_costs(
        self, num_layers: Sequence[int], speeds: Sequence[float] | None = None
    ) -> tuple[list[float], float, float]:
        """The time of a microbatch in each layer, in the embedding and in the head, in ms: for `distribute_layers`.

        The layers of a stage count alike. Those of the first and last stage count as the mean of the others; the rest
        of these stages' time is the embedding's and the head's.

        Args:
            num_layers: of each stage, as it was measured.
            speeds: how fast each rank is; the costs are then those on a rank of speed 1. `speeds(num_layers)` finds
                them. None for ranks that are alike.

        Returns:
            `costs`, `num_virtual_layers_pre` and `num_virtual_layers_post`.

        Raises:
            ValueError: there are not as many stages, or none between the first and the last that has layers; or layers
                take longer on some ranks than on others, and `speeds` does not say why.
        """
        found = self.speeds(num_layers)
        if speeds is None and min(found) < UNEVEN:
            raise ValueError(
                f"a layer takes {1 / min(found):.2g} times as long on rank {found.index(min(found))} as on rank "
                f"{found.index(max(found))}: pass speeds=timeline.speeds({list(num_layers)}) where the ranks differ, "
                f"or speeds={[1] * len(found)} where the layers do."
            )
        times = [
            time * (speeds or [1.0] * self.plan.pp_size)[self.plan.rank_of(s)] for s, time in enumerate(self._work)
        ]
        inner = [(time, count) for time, count in list(zip(times, num_layers))[1:-1] if count]
        mean = sum(time for time, _ in inner) / sum(count for _, count in inner)
        of_inner = [time / count for time, count in inner for _ in range(count)]
        embedding, head = (max(0.0, times[end] - mean * num_layers[end]) for end in (0, -1))
        return [mean] * num_layers[0] + of_inner + [mean] * num_layers[-1], embedding, head

    @cached_property
    def _mean_slices(self) -> list[float] | None:
        """The time in each slice on all stages, in ms; None where sequences are whole."""
        times = [0.0] * self.plan.num_slices
        for span in (span for step in self.steps for rank in step for span in rank.spans):
            times[span.action.slice] += span.end - span.start
        return None if len(times) == 1 else times

    def even_costs(self) -> Costs:
        """The costs, with all stages alike, and all slices: the times of one microbatch on a whole rank, in ms."""
        costs = self.costs()
        parts = (costs.forward, costs.backward_input, costs.backward_weight)
        forward, inputs, weights = (sum(part) / self.plan.pp_size for part in parts if isinstance(part, list))
        # Not all units have an R: those that follow their F at once, such as all of the last rank, have none.
        measured = [time for time in costs.recompute if time] if isinstance(costs.recompute, list) else []
        recompute = fmean(measured) * self.plan.num_chunks if measured else None
        return Costs(forward, inputs, weights, costs.p2p, recompute=recompute)

    def rank_costs(self) -> Costs:
        """`even_costs`, with each rank as fast as it was: for any schedule on these ranks."""
        mean, speeds = self.even_costs(), self.speeds()
        slowness = sum(1 / speed for speed in speeds) / len(speeds)
        return replace(mean, speeds=[speed * slowness for speed in speeds])

    @cached_property
    def peak_bytes(self) -> list[int]:
        """Most bytes of tensors made in a step that each rank held at once; none where they were not counted."""
        peaks = [max(rank.peak_bytes for rank in steps) for steps in zip(*self.steps)]
        return peaks if any(peaks) else []

    def predict(self) -> Simulation:
        """Simulate the plan with `costs`: in ms."""
        return simulate(self.plan, self.costs())

    def save(self, path: str | Path) -> None:
        """Save as JSON, which `load_timeline` reads."""
        steps = [list(map(as_json, step)) for step in self.steps]
        content = {"timeline": self.name, "unit": "ms", "steps": steps}
        Path(path).write_text(json.dumps(content, separators=(",", ":")) + "\n")


def load_timeline(path: str | Path) -> Timeline | None:
    """Load a timeline that was saved.

    Returns:
        The timeline, or None where the file holds something else, such as a plan.

    Raises:
        ValueError: the file is no text, its steps cannot be read, or they are not of one plan.
    """
    text = read_text(path)
    if not text.lstrip().startswith("{") or '"timeline"' not in text:
        return None
    content = parse_json(path, text)
    if "timeline" not in content:
        return None
    try:
        steps = [[read_rank(rank) for rank in step] for step in content["steps"]]
    except (LookupError, TypeError, ValueError, OverflowError):
        raise ValueError(f"{path} does not hold a timeline as it was recorded: record a new one.") from None
    plans = [[[span.action for span in rank.spans] for rank in step] for step in steps]
    if not plans or not plans[0] or not all(plans[0]) or any(plan != plans[0] for plan in plans):
        raise ValueError(f"{path} does not hold steps of one and the same plan: record a new one.")
    if not all(step_time(step) > 0 for step in steps):
        raise ValueError(f"{path} holds a step that takes no time: record a new one.")
    return Timeline(str(content["timeline"]), steps)


def as_json(rank: RankStep) -> dict[str, Any]:
    """A step of one rank as it is saved, and sent to others."""
    waits = [(action or (None, None, None, 0), start, end) for action, start, end in rank.waits]
    return {
        "begin": _rounded(rank.begin),
        "end": _rounded(rank.end),
        "actions": [[*action, _rounded(start), _rounded(end)] for action, start, end in rank.spans],
        "waits": [[*action, _rounded(start), _rounded(end)] for action, start, end in waits],
        "pairs": rank.pairs,
        "peak_bytes": rank.peak_bytes,
    }


def read_rank(rank: dict[str, Any]) -> RankStep:
    spans = [Span(_read_action(*action), *_read_times(start, end)) for *action, start, end in rank["actions"]]
    waits = [
        Wait(None if action[0] is None else _read_action(*action), *_read_times(start, end))
        for *action, start, end in rank["waits"]
    ]
    pairs = tuple(rank.get("pairs", ()))  # older files have none
    if not all(isinstance(at, int) and 0 <= at < len(spans) - 1 for at in pairs):
        raise ValueError
    return RankStep(*_read_times(rank["begin"], rank["end"]), spans, waits, pairs, int(rank.get("peak_bytes", 0)))


def _read_action(stage: Any, kind: Any, microbatch: Any, part: Any = 0) -> Action:
    if kind not in KINDS or not all(isinstance(number, int) for number in (stage, microbatch, part)):
        raise ValueError
    return Action(stage, kind, microbatch, part)


def _read_times(start: Any, end: Any) -> tuple[float, float]:
    times = float(start), float(end)
    if not (all(map(math.isfinite, times)) and times[0] <= times[1]):
        raise ValueError
    return times


def measured_messages(plan: Plan, step: Sequence[RankStep]) -> Iterator[MeasuredMessage]:
    """The messages between ranks in a step: its record on each rank, on one clock."""
    sent: dict[Event, tuple[int, float]] = {}
    for rank, events in enumerate(plan.events):
        spans = iter(step[rank].spans)
        end = step[rank].begin
        for event in events:
            if event.action is not None:
                end = next(spans).end
            elif event.sends and plan.peer(rank, event) is not None:
                sent[event] = (rank, end)
    for rank, events in enumerate(plan.events):
        awaited = {wait.action: wait.start for wait in step[rank].waits}
        starts = {span.action: span.start for span in step[rank].spans}
        for event in events:
            needed, action = plan.needs(event), event.action
            if needed in sent and action is not None:
                yield MeasuredMessage(*sent[needed], rank, starts[action], awaited.get(action, starts[action]))


def step_time(step: Sequence[RankStep]) -> float:
    """The length of a step in ms, from the start of the first action on any rank to the end of the last one.

    It does not count from the first rank's beginning: without a barrier that rank begins while others are still in the
    step before.

    Args:
        step: its record on each rank.
    """
    return max(rank.spans[-1].end for rank in step) - first_start(step)


def first_start(step: Sequence[RankStep]) -> float:
    """The start of the first action on any rank, in ms."""
    return min(rank.spans[0].start for rank in step)


def _rounded(time: float) -> float:
    return round(time, 4)  # 0.1 us: what a clock is good for, and half the size of the file
