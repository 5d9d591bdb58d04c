"""Which activations go to host memory, decided on the plan: those that are back before their backward without moving
any action. So a step is never longer, as far as times are those of the plan.

Copies run beside the rank's actions, one each way at a time. A unit leaves when its F is done; where its copy is over,
O frees its memory; L takes memory again and begins the copy back, as late as can be. Whole chunks go, those first whose
units wait longest for their backward: a chunk whose backwards follow at once would hold the copies up for nothing. Of
the chunk that does not fit as a whole, as many units go as can, evenly spread. Of all these, units stay whose trips
lower no peak.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import NamedTuple

from .kinds import KINDS, LOAD, OFFLOAD, kind_of
from .memory import StageBytes, rank_bytes
from .plan import Plan
from .recorder import Event
from .simulation import Costs, Span, simulate
from .verbs import Action

Unit = tuple[int, int]
"""A stage and a microbatch."""


class _Life(NamedTuple):
    """When a unit's activations could be away."""

    made: float
    """The end of its F."""
    needed: float
    """The start of its backward."""
    size: float
    """How long it takes to copy, one way."""


class _Trip(NamedTuple):
    left: float
    """When it is in host memory."""
    returns: float
    """When its copy back begins."""


def offload_activations(plan: Plan, costs: Costs, copying: float) -> Plan:
    """The plan with activations moved to host memory and back (O, L) where that takes no time of the step's.

    Run it by `get_forward_backward_func(plan)`. Units that are computed again (R) stay, and so do those that go forward
    in an overlapped pair. What is held from B to W stays too: with `max_pending_weights` set that is little.

    Args:
        costs: the times to judge by, those of `simulate`; measured ones are `timeline.costs()`.
        copying: the time to copy what an F saves to host memory, over the time of that F: bytes saved over the
            bandwidth, over the F. The way back takes as long.

    Raises:
        ValueError: `copying` is not more than 0, sequences are cut into slices, the plan has no backwards, or moves
            activations already.
    """
    if not copying > 0:
        raise ValueError(f"copying is the time of a copy over that of an F, more than 0, got {copying}.")
    if plan.num_slices > 1 or plan.forward_only:
        raise ValueError(
            f"activations of {plan.name} are not moved to host memory, since it runs forwards only, or slices of "
            "sequences, of which each is needed by those after it: take a schedule with backwards and whole sequences, "
            "or leave activations where they are."
        )
    if any(plan.offloaded):
        raise ValueError(f"{plan.name} is a plan that moves activations to host memory already: run it as it is.")
    forward = costs.per_stage("forward", plan)
    spans = simulate(plan, costs).spans
    rows = []
    for rank, events in enumerate(plan.events):
        own, pairs = list(spans[rank]), plan.program.pairs[rank]
        in_pairs = {own[at].action for at in pairs}
        lives = _lives(own, forward, copying, plan.recomputed[rank] | in_pairs)
        rows.append(_insert(events, _places(own, _trips(_choose(lives)), set(pairs.values()))))
    moved, memory = replace(plan, events=rows), costs.memory or StageBytes(saved=1.0)
    return replace(plan, events=[_needed(moved, rank, memory) for rank in range(plan.pp_size)])


def _lives(
    spans: Sequence[Span], forward: Sequence[float], copying: float, kept: AbstractSet[Action]
) -> dict[Unit, _Life]:
    made: dict[Unit, float] = {}
    lives: dict[Unit, _Life] = {}
    for action, start, end in spans:
        unit = action.stage, action.microbatch
        if KINDS[action.kind].is_forward:
            if action not in kept and forward[action.stage] > 0:  # or there is nothing to copy
                made[unit] = end
        elif KINDS[action.kind].direction is not None and unit in made:
            lives[unit] = _Life(made.pop(unit), start, copying * forward[action.stage])
    return lives


def _choose(lives: Mapping[Unit, _Life]) -> dict[Unit, _Life]:
    """Whole chunks, the longest lives first; of those that do not fit, as many units as do."""
    waits: dict[int, float] = {}
    for (stage, _), life in lives.items():
        waits[stage] = waits.get(stage, 0.0) + life.needed - life.made
    chosen: dict[Unit, _Life] = {}
    for stage in sorted(waits, key=lambda stage: -waits[stage]):
        units = [unit for unit in lives if unit[0] == stage]
        least, most = 0, len(units)
        while least < most:  # the largest number that fits, as if fewer always did where more do
            number = (least + most + 1) // 2
            if _trips(chosen | {unit: lives[unit] for unit in _spread(units, number)}, or_none=True):
                least = number
            else:
                most = number - 1
        chosen |= {unit: lives[unit] for unit in _spread(units, least)}
    return chosen


def _spread(units: Sequence[Unit], number: int) -> list[Unit]:
    """So many of the units, evenly spread."""
    total = len(units)
    return [unit for at, unit in enumerate(units) if (at + 1) * number // total > at * number // total]


def _trips(lives: Mapping[Unit, _Life], or_none: bool = False) -> dict[Unit, _Trip]:
    """The copies of these units, one after the other each way: out as soon as can be, back as late as can be. With
    `or_none` nothing where one is not back in time."""
    left, free = {}, 0.0
    for unit, life in sorted(lives.items(), key=lambda item: item[1].made):
        left[unit] = free = max(free, life.made) + life.size
    trips, before = {}, float("inf")
    for unit, life in sorted(lives.items(), key=lambda item: item[1].needed)[::-1]:  # also of Bs that take no time
        before = min(before, life.needed) - life.size
        if or_none and before < left[unit] - 1e-9:
            return {}
        trips[unit] = _Trip(left[unit], before)
    return trips


def _places(
    spans: Sequence[Span], trips: Mapping[Unit, _Trip], closed: AbstractSet[int]
) -> dict[int, list[tuple[str, Unit]]]:
    """The verbs to come before each action, by its place in the row. A unit that would leave no gap stays.

    Args:
        closed: the places of the second halves of pairs, before which nothing comes.
    """
    starts = [span.start for span in spans]
    timed: dict[int, list[tuple[float, str, Unit]]] = {}
    for unit, (left, returns) in trips.items():
        out, back = bisect_left(starts, left - 1e-9), bisect_right(starts, returns + 1e-9) - 1
        back += spans[back].end <= returns + 1e-9  # the rank waits by then: as its next action
        out, back = out + (out in closed), back - (back in closed)
        if out < back:
            timed.setdefault(out, []).append((left, OFFLOAD.verb, unit))
            timed.setdefault(back, []).append((returns, LOAD.verb, unit))
    # In the order of their times: O waits for its copy, and would hold up an L that is due before.
    return {place: [(verb, unit) for _, verb, unit in sorted(verbs, key=_time)] for place, verbs in timed.items()}


def _needed(plan: Plan, rank: int, memory: StageBytes) -> list[Event]:
    """The events of a rank without trips that lower no peak. The shortest are looked at first."""
    during = rank_bytes(plan, rank, memory).during
    most = during.max(initial=0.0) * (1 + 1e-9)
    trips: dict[Unit, list[int]] = {}
    for at, action in enumerate(plan.actions[rank]):
        if action.kind in (OFFLOAD.name, LOAD.name):
            trips.setdefault((action.stage, action.microbatch), []).append(at)
    saved, received = memory.per_stage("saved", plan), [0.0, *memory.per_stage("message", plan)]
    for unit, (out, back) in sorted(trips.items(), key=lambda trip: trip[1][1] - trip[1][0]):
        away = slice(out + 1, back)
        size = saved[unit[0]] - received[unit[0]]  # what was received stays
        if during[away].max() + size <= most:
            during[away] += size
            del trips[unit]
    moves = OFFLOAD.verb, LOAD.verb
    return [event for event in plan.events[rank] if event.verb not in moves or event[1:3] in trips]


def _time(verb: tuple[float, str, Unit]) -> tuple[float, bool]:
    """When it is due: of those at the same time O first, which frees memory."""
    return round(verb[0], 9), verb[1] == LOAD.verb


def _insert(events: Sequence[Event], places: Mapping[int, list[tuple[str, Unit]]]) -> list[Event]:
    row: list[Event] = []
    number = 0
    for event in events:
        if kind_of(event.verb) is not None:
            row += [Event(verb, stage, microbatch) for verb, (stage, microbatch) in places.get(number, ())]
            number += 1
        row.append(event)
    return row
