"""A plan compiled for playing: messages and actions are numbers, looked up once. And the player.

Checks, simulations, the split of a measured bubble, and the search for places of deferred weight-gradient passes (W)
all play plans here, so they judge by the same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from math import inf
from sys import float_info
from typing import NamedTuple

from .kinds import is_overlapped, kind_of
from .recorder import ChannelName, Event

NOT_SENT = -float_info.max
"""Stands for the time at which a message arrives. That may be inf, where the times given are."""


@dataclass(frozen=True)
class Program:
    """Columns by rank have one entry per action of the plan, in its order."""

    sources: list[list[int]]
    """The message that each action waits for, by rank; -1 for none."""
    sent: list[list[int]]
    """The messages that each rank sends, in their order."""
    sent_until: list[list[int]]
    """How many of those are sent before the action that follows, by rank."""
    pairs: list[dict[int, int]]
    """The positions of overlapped pairs, by rank: that of the second action by that of the first."""
    channels: list[ChannelName | None]
    """The channel that each message occupies; None between two stages of the same rank."""


def compile_events(
    rows: Sequence[Sequence[Event]], ranks: Sequence[int], needs: Callable[[Event], Event | None]
) -> Program:
    """
    Args:
        rows: the calls of each rank.
        ranks: those of the stages.
        needs: the send that a computation waits for, if any.
    """
    numbers: dict[Event, int] = {}
    channels: list[ChannelName | None] = []

    def number_of(event: Event) -> int:
        """That of the message that is sent or needed; -1 for none, and at the ends of the pipeline."""
        send = event if event.sends else needs(event)
        if send is None:
            return -1
        if send not in numbers:
            _, boundary = channel = send.channel
            exists = 0 <= boundary < len(ranks) - 1
            numbers[send] = len(channels) if exists else -1
            if exists:
                channels.append(channel if ranks[boundary] != ranks[boundary + 1] else None)
        return numbers[send]

    sources, sent, sent_until, pairs = map(list, zip(*(_compile_row(row, number_of) for row in rows)))
    return Program(sources, sent, sent_until, pairs, channels)


def _compile_row(
    row: Sequence[Event], number_of: Callable[[Event], int]
) -> tuple[list[int], list[int], list[int], dict[int, int]]:
    sources: list[int] = []
    sent: list[int] = []
    sent_before: list[int] = []
    halves: list[int] = []
    for event in row:
        if kind_of(event.verb) is not None:
            if is_overlapped(event.verb):
                halves.append(len(sources))
            sources.append(number_of(event))
            sent_before.append(len(sent))
        elif event.sends and (number := number_of(event)) >= 0:
            sent.append(number)
    return sources, sent, [*sent_before[1:], len(sent)], dict(zip(halves[::2], halves[1::2]))


def run(
    program: Program,
    durations: Sequence[Sequence[float]],
    clocks: list[float],
    begin: Callable[[int, int, float, float], float] | None = None,
    tails: Sequence[Sequence[float]] | None = None,
    *,
    p2p: float = 0.0,
    message: float = 0.0,
) -> tuple[list[list[float]], list[list[float]]]:
    """Run all ranks side by side from the times in `clocks`, which are moved on.

    Args:
        durations: by rank, the time of each action.
        clocks: when each rank begins; moved on to when it ends.
        begin: called as begin(rank, index, clock, arrival) when a rank gets to an action at `clock` whose last message
            is there at `arrival` (-inf for an action without one). Returns the time from which the rank is free for it.
        tails: by rank, how long before its end an action has sent what it makes. With them a pair runs as one action,
            which waits for the messages of both, and sends both at its end. None runs one after the other.
        p2p, message: as in `Costs`.

    Returns:
        By rank, the starts and the ends of the actions that it gets through: all, unless the plan hangs.
    """
    never = len(program.channels)  # the message that a rank waits for at its end
    arrivals = [NOT_SENT] * (never + 1) + [-inf]  # at -1: for an action that needs no message
    transfers = _Transfers(program.channels, arrivals, defaultdict(float), p2p, message)
    starts: list[list[float]] = [[] for _ in clocks]
    ends: list[list[float]] = [[] for _ in clocks]
    ranks = []
    for rank, (clock, sources, times) in enumerate(zip(clocks, program.sources, durations)):
        actions: Iterable[tuple[int, int, float, float, int]]
        if tails is None:
            actions = zip(sources, repeat(-1), times, repeat(0.0), program.sent_until[rank])
        else:
            actions = _in_pairs(program, rank, times, tails[rank])
        ranks.append(_run_rank(rank, clock, actions, program.sent[rank], begin, starts[rank], ends[rank], transfers))
    missing = [-1] * len(ranks)  # by rank, the message that it waits for
    while ready := [rank for rank, number in enumerate(missing) if arrivals[number] != NOT_SENT]:
        for rank in ready:
            missing[rank] = next(ranks[rank], never)
    clocks[:] = [ends_of[-1] if ends_of else clock for ends_of, clock in zip(ends, clocks)]
    return starts, ends


class _Transfers(NamedTuple):
    """The messages of a plan that is played."""

    channels: list[ChannelName | None]
    arrivals: list[float]
    """When each message arrives; NOT_SENT for those that are still to be sent."""
    busy_until: defaultdict[ChannelName, float]
    """Until when each channel is busy."""
    p2p: float
    message: float


def _run_rank(
    rank: int,
    clock: float,
    actions: Iterable[tuple[int, int, float, float, int]],
    sent: list[int],
    begin: Callable[[int, int, float, float], float] | None,
    starts: list[float],
    ends: list[float],
    transfers: _Transfers,
) -> Iterator[int]:
    """Run a rank to its end. Yields each message that it has to wait for; to be resumed once that is sent."""
    channels, arrivals, busy_until, p2p, message = transfers
    num_sent = 0
    for source, other, time, tail, sent_until in actions:
        arrival = arrivals[source]
        if arrival == NOT_SENT:
            yield source
            arrival = arrivals[source]
        if other >= 0:
            if arrivals[other] == NOT_SENT:
                yield other
            arrival = max(arrival, arrivals[other])
        if begin is not None:
            clock = begin(rank, len(ends), clock, arrival)
        if arrival > clock:
            clock = arrival
        starts.append(clock)
        clock += time
        ends.append(clock)
        while num_sent < sent_until:
            number = sent[num_sent]
            num_sent += 1
            channel = channels[number]
            sent_at = clock - tail
            if channel is None:
                arrivals[number] = sent_at
            else:
                busy = busy_until[channel]
                busy_until[channel] = free_at = (busy if busy > sent_at else sent_at) + message
                arrivals[number] = free_at + p2p


def _in_pairs(
    program: Program, rank: int, times: Sequence[float], tails: Sequence[float]
) -> Iterable[tuple[int, int, float, float, int]]:
    """The actions of a rank whose pairs are overlapped: the first of a pair waits for the second's message as well, and
    the second sends what the first has made."""
    sources, sent_until = program.sources[rank], program.sent_until[rank][:]
    others = [-1] * len(sources)
    for first, second in program.pairs[rank].items():
        others[first] = sources[second]
        sent_until[first] = sent_until[first - 1] if first else 0
    return zip(sources, others, times, tails, sent_until)
