"""A plan compiled for playing: messages, channels and actions are numbers, looked up once. And the player.

Checks, simulations, the split of a measured bubble, and the search for places of deferred weight-gradient passes (W)
all play plans here, so they judge by the same rules.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import TYPE_CHECKING

from .recorder import KINDS, Event
from .rows import Row
from .verbs import PAIR

if TYPE_CHECKING:
    from .plan import Plan

__all__ = ["Program", "compile_plan", "run"]


@dataclass(frozen=True)
class Program:
    """Columns by rank have one entry per action of the plan, in its order."""

    sources: list[array[int]]
    """By rank, the message that each action waits for; -1 for none."""
    sent: list[array[int]]
    """By rank, the messages that it sends, in their order."""
    sent_until: list[array[int]]
    """By rank, how many of those are sent before the action that follows."""
    pairs: list[dict[int, int]]
    """By rank, the positions of overlapped pairs: that of the backward by that of its forward."""
    channels: array[int]
    """By message, the channel that it occupies; -1 between two stages of the same rank."""
    num_channels: int

    @cached_property
    def senders(self) -> list[tuple[int, int]]:
        """By message, the rank that sends it, and after which action."""
        senders = [(0, 0)] * len(self.channels)
        for rank, (sent, sent_until) in enumerate(zip(self.sent, self.sent_until)):
            for index, (first, last) in enumerate(pairwise([0, *sent_until])):
                for message in sent[first:last]:
                    senders[message] = rank, index
        return senders


def compile_plan(plan: Plan) -> Program:
    num_channels = 2 * plan.pp_size * plan.num_chunks
    num_units = plan.num_microbatches * plan.num_slices
    numbers = None if plan.is_recorded else _Numbers()  # a file may have few microbatches with large numbers
    columns = [_compile_row(plan, row, num_units, numbers) for row in plan.rows]
    ranks = list(map(plan.rank_of, range(plan.pp_size * plan.num_chunks)))
    crosses = [below != above for below, above in pairwise(ranks) for _ in range(2)] + [False, False]
    names = [channel if crosses[channel] else -1 for channel in range(num_channels)]
    if numbers is None:
        channels = array("i", chain.from_iterable(map(repeat, names, repeat(num_units))))
    else:
        channels = array("i", [names[key // num_units] for key in numbers])
    sources, sent, sent_until, pairs = map(list, zip(*columns))
    return Program(sources, sent, sent_until, pairs, channels, num_channels)


class _Numbers(dict[int, int]):
    """Numbers from 0 on, in the order in which their keys are met."""

    def __missing__(self, key: int) -> int:
        self[key] = len(self)
        return self[key]


def _compile_row(
    plan: Plan, row: Row[Event], num_units: int, numbers: _Numbers | None
) -> tuple[array[int], array[int], array[int], dict[int, int]]:
    """The columns of a rank. A message's number, unless `numbers` says otherwise, is channel * num_units + unit."""
    facts = [_facts(plan, Event(*word, 0)) for word in row.words]
    computes = [fact[0] for fact in facts]
    firsts = [fact[1] * num_units for fact in facts]  # below 0 for those of no message
    sources, sent, sent_until, pairs = array("q"), array("q"), array("q"), {}
    verbs = [verb for verb, _ in row.words]
    is_half = [verb in PAIR for verb in verbs]
    for code, unit in zip(row.codes, row.units):
        first = firsts[code]
        message = -1 if first < 0 else first + unit if numbers is None else numbers[first + unit]
        if computes[code]:
            if is_half[code]:
                if verbs[code] == PAIR[0]:
                    forward = len(sources)
                else:
                    pairs[forward] = len(sources)
            if sources:
                sent_until.append(len(sent))
            sources.append(message)
        elif message >= 0:
            sent.append(message)
    if sources:
        sent_until.append(len(sent))
    return sources, sent, sent_until, pairs


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
) -> tuple[list[array[float]], list[array[float]]]:
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
    channels = program.channels
    arrivals = [math.inf] * len(channels) + [-math.inf]  # the last for an action that needs no message: at -1
    busy_until = [0.0] * program.num_channels
    starts = [array("d") for _ in clocks]
    ends = [array("d") for _ in clocks]
    waiting: dict[int, int] = {}  # the rank that waits for a message
    runnable = deque(range(len(clocks)))  # the rank that was woken first, so that it gets far: more has arrived by then
    pairs_of = program.pairs if overlap else [{} for _ in clocks]
    columns = list(zip(program.sources, durations, program.sent, program.sent_until, pairs_of, starts, ends))
    while runnable:
        rank = runnable.popleft()
        clock = clocks[rank]
        sources, times, sent, sent_until, pairs, starts_of, ends_of = columns[rank]
        num_done = len(ends_of)
        num_sent = sent_until[num_done - 1] if num_done else 0
        for index in range(num_done, len(sources)):
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
            if arrival > clock:
                clock = arrival
            starts_of.append(clock)
            clock += times[index]
            ends_of.append(clock)
            while num_sent < sent_until[index]:
                message_sent = sent[num_sent]
                num_sent += 1
                channel = channels[message_sent]
                if channel < 0:
                    arrivals[message_sent] = clock
                else:
                    busy_until[channel] = free_at = max(clock, busy_until[channel]) + message
                    arrivals[message_sent] = free_at + p2p
                if message_sent in waiting:
                    runnable.append(waiting.pop(message_sent))
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
