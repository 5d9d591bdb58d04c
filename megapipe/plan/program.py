"""A plan compiled for playing: messages, channels and actions are numbers, looked up once. And the player.

Checks, simulations, the split of a measured bubble, and the search for places of deferred weight-gradient passes (W)
all play plans here, so they judge by the same rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from .recorder import KINDS, Event
from .verbs import PAIR

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Program", "compile_plan", "run"]


@dataclass(frozen=True)
class Program:
    """Lists by rank have one entry per action of the plan, in its order."""

    sources: list[list[int]]
    """By rank, the message that each action waits for; -1 for none."""
    sends: list[list[tuple[int, ...]]]
    """By rank, the messages that are sent between each action and the next."""
    pairs: list[dict[int, int]]
    """By rank, the positions of overlapped pairs: that of the backward by that of its forward."""
    channels: list[int]
    """By message, the channel that it occupies; -1 between two stages of the same rank."""
    senders: list[tuple[int, int]]
    """By message, the rank that sends it, and after which action."""
    num_channels: int


def compile_plan(plan: Plan) -> Program:
    num_channels = 2 * plan.pp_size * plan.num_chunks
    numbers: dict[int, int] = {}  # of the messages, by channel, microbatch and slice
    facts: dict[tuple[str, int], tuple[bool, int]] = {}  # of each verb on each stage
    sources: list[list[int]] = [[] for _ in plan.events]
    sends: list[list[tuple[int, ...]]] = [[] for _ in plan.events]
    pairs: list[dict[int, int]] = [{} for _ in plan.events]
    for events, waits, sent, pair in zip(plan.events, sources, sends, pairs):
        for verb, stage, microbatch, part in events:
            if (verb, stage) not in facts:
                facts[verb, stage] = _facts(plan, Event(verb, stage, microbatch, part))
            computes, channel = facts[verb, stage]
            unit = microbatch * plan.num_slices + part
            number = -1 if channel < 0 else numbers.setdefault(unit * num_channels + channel, len(numbers))
            if computes:
                if verb == PAIR[0]:
                    forward = len(waits)
                elif verb == PAIR[1]:
                    pair[forward] = len(waits)
                waits.append(number)
                sent.append(())
            elif number >= 0:
                sent[-1] += (number,)
    senders = [(0, 0)] * len(numbers)
    for rank, sent in enumerate(sends):
        for index, messages in enumerate(sent):
            for number in messages:
                senders[number] = (rank, index)
    ranks = list(map(plan.rank_of, range(plan.pp_size * plan.num_chunks)))
    crosses = [below != above for below, above in pairwise(ranks) for _ in range(2)]
    channels = [key % num_channels if crosses[key % num_channels] else -1 for key in numbers]
    return Program(sources, sends, pairs, channels, senders, num_channels)


def _facts(plan: Plan, event: Event) -> tuple[bool, int]:
    """Whether a verb computes, and the number of the channel that it waits for or sends on; -1 for none."""
    computes = event.verb in KINDS
    send = plan.needs(event) if computes else event if event.sends else None
    if send is None:
        return computes, -1
    kind, boundary = send.channel
    exists = 0 <= boundary < plan.pp_size * plan.num_chunks - 1
    return computes, 2 * boundary + (kind == "forward") if exists else -1


def run(
    program: Program,
    durations: Sequence[Sequence[float]],
    clocks: list[float],
    begin: Callable[[int, int, float, float], float] | None = None,
    *,
    p2p: float = 0.0,
    message: float = 0.0,
    overlap: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Run all ranks side by side from the times in `clocks`, which are moved on.

    Args:
        durations: by rank, the time of each action.
        clocks: when each rank begins; moved on to when it ends.
        begin: called as begin(rank, index, clock, arrival) when a rank gets to an action at `clock` whose last message
            is there at `arrival` (-inf for an action without one). Returns the time from which the rank is free for it.
        p2p, message, overlap: as in `Costs`.

    Returns:
        By rank, the starts and the ends of the actions that it gets through: all, unless the plan hangs.
    """
    if overlap:
        durations = [_overlapped(*rank, overlap) for rank in zip(durations, program.pairs)]
    arrivals = [math.inf] * len(program.channels) + [-math.inf]  # the last for an action that needs no message: at -1
    busy_until = [0.0] * program.num_channels
    starts: list[list[float]] = [[] for _ in clocks]
    ends: list[list[float]] = [[] for _ in clocks]
    waiting: dict[int, int] = {}  # the rank that waits for a message
    runnable = list(range(len(clocks)))
    while runnable:
        rank = runnable.pop()
        clock, sources, times = clocks[rank], program.sources[rank], durations[rank]
        pairs = program.pairs[rank] if overlap else {}
        for index in range(len(ends[rank]), len(sources)):
            source = sources[index]
            arrival = arrivals[source]
            if index in pairs and arrivals[sources[pairs[index]]] > arrival:
                source = sources[pairs[index]]
                arrival = arrivals[source]
            if arrival == math.inf:
                waiting[source] = rank
                break
            if begin is not None:
                clock = begin(rank, index, clock, arrival)
            clock = max(clock, arrival)
            starts[rank].append(clock)
            clock += times[index]
            ends[rank].append(clock)
            for sent in program.sends[rank][index]:
                arrivals[sent] = clock
                channel = program.channels[sent]
                if channel >= 0:
                    busy_until[channel] = max(clock, busy_until[channel]) + message
                    arrivals[sent] = busy_until[channel] + p2p
                if sent in waiting:
                    runnable.append(waiting.pop(sent))
        clocks[rank] = clock
    return starts, ends


def _overlapped(durations: Sequence[float], pairs: dict[int, int], overlap: float) -> list[float]:
    """The longer action of a pair hides a share of the shorter one. Both shrink alike."""
    shrunk = list(durations)
    for pair in pairs.items():
        times = [durations[index] for index in pair]
        for index in pair:
            shrunk[index] *= 1 - overlap * min(times) / (sum(times) or 1.0)
    return shrunk
