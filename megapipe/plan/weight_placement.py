"""Where the Ws go, decided on the plan: F, B and W never take exactly the same time, so a fixed place leaves holes.

A W may run at any time after its B, at no change to any message. So the order of a rank's Fs and Bs stays the
schedule's, and its Ws follow in the order of its Bs; only how many Ws run before each F and B is searched for, by
playing the whole pipeline through time. A fixed rule, such as to run a W whenever there is nothing else to do, makes
some schedules faster and others slower; here it is only where the search begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from .kinds import KINDS, WEIGHTS
from .memory import held_changes
from .plan import Plan
from .program import run
from .recorder import Event
from .simulation import Costs, simulate
from .verbs import Action

__all__ = ["place_weights"]

Counts = list[list[int]]
"""Per rank, how many Ws run before each of its Fs and Bs, and after the last."""

FILLS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""How long, in Ws, a wait must be to be filled with one: rules to begin the search with. 1 delays no rank, 0 fills
every wait; the search goes on from the best."""

BUDGET = 300_000
"""How many Fs and Bs the search may play: about a third of a second."""

GAIN = 0.005
"""Share of the makespan that other places must gain. Less than that disappears in the noise of measured steps
(benchmarks/TABLES.md)."""

SLACK = 1 / 4
"""How much more a rank may hold than by the schedule, without a limit: this share of a pipeline's microbatches."""


def place_weights(plan: Plan, costs: Costs, max_held: float | None = None) -> Plan:
    """`plan` with its Ws where they make one step as short as the search finds; `plan` itself where that gains less
    than half a percent, or where it moves activations to host memory, for then they are timed by its Ws. The same
    arguments give the same places.

    Args:
        plan: a plan that can run.
        costs: the times to judge by, those of `simulate`.
        max_held: most microbatches of a whole rank that a rank may have in flight, from F to W. None for a quarter of
            the number of ranks more than in `plan`.
    """
    if any(plan.offloaded):
        return plan
    own = simulate(plan, costs)
    if max_held is None:
        max_held = max(own.peak_activations) + SLACK * plan.pp_size
    placed = move_weights(plan, find_counts(plan, costs, max_held))
    return placed if simulate(placed, costs).makespan < (1 - GAIN) * own.makespan else plan


def count_weights(plan: Plan) -> Counts:
    """How many Ws a plan runs before each F and B, and after the last."""
    counts: Counts = []
    for actions in plan.actions:
        row = [0]
        for action in actions:
            if action.kind == WEIGHTS.name:
                row[-1] += 1
            else:
                row.append(0)
        counts.append(row)
    return counts


def move_weights(plan: Plan, counts: Counts) -> Plan:
    """`plan` with its Ws in other places, in the order of the Bs."""
    moved = []
    for events, row in zip(plan.events, counts):
        others = [event for event in events if event.verb != WEIGHTS.verb]
        weights = iter([e._replace(verb=WEIGHTS.verb) for e in others if e.action and e.action.kind == WEIGHTS.after])
        moved.append(list(_merge(others, weights, row)))
    return replace(plan, events=moved)


def _merge(others: list[Event], weights: Iterator[Event], row: list[int]) -> Iterator[Event]:
    counts = iter(row)
    for event in others:
        if event.action is not None:
            yield from (next(weights) for _ in range(next(counts)))
        yield event
    yield from weights


def find_counts(plan: Plan, costs: Costs, max_held: float) -> Counts:
    """Places for the Ws of `plan`, for `move_weights`. A step is never longer than it was."""
    unmoved = count_weights(plan)
    if not any(map(sum, unmoved)):
        return unmoved
    search = _Search(plan, costs, int(max_held * plan.num_chunks * plan.num_slices + 1e-9))
    candidates = [unmoved, *(search.fill(share) for share in FILLS)]
    candidates.sort(key=search.makespan)
    return min((search.improve(counts) for counts in candidates[:2]), key=search.makespan)


def _deadlines(actions: Sequence[Action], pairs: dict[int, int]) -> list[int]:
    """How many Ws must be done before each F and B: a whole backward adds to the same gradients as the Ws of its stage
    before it, which must not come after it. In an overlapped pair they come before both."""
    deadlines = []
    num_deferred = 0
    last: dict[int, int] = {}  # per stage, how many had been deferred when its last was
    for action in actions:
        deadlines.append(last.get(action.stage, 0) if KINDS[action.kind].completes_weights else 0)
        if action.kind == WEIGHTS.after:
            num_deferred += 1
            last[action.stage] = num_deferred
    for first, second in pairs.items():
        deadlines[first] = deadlines[second]
    return deadlines


class _Search:
    """The Fs and Bs of a plan, to be played many times with Ws in other places.

    Args:
        max_held: in microbatches of a chunk, or slices of them.
    """

    def __init__(self, plan: Plan, costs: Costs, max_held: int) -> None:
        unweighted = replace(plan, events=[[e for e in row if e.verb != WEIGHTS.verb] for row in plan.events])
        duration = costs.of_actions(plan)
        actions = unweighted.actions
        self.ranks = range(plan.pp_size)
        self.max_held = max_held
        self.of_messages = costs.of_messages(plan)
        self.program = unweighted.program
        self.kinds = [[action.kind for action in row] for row in actions]
        self.held = [held_changes(row).tolist() for row in actions]
        self.durations, self.tails = costs.hidden(unweighted)
        self.weights = [
            [duration(a._replace(kind=WEIGHTS.name)) for a in row if a.kind == WEIGHTS.after] for row in actions
        ]
        """The Ws of each rank, in their order."""
        self.closed = [set(pairs.values()) for pairs in self.program.pairs]
        """The second halves of overlapped pairs, by rank: no W runs between the halves."""
        self.deadlines = [_deadlines(*row) for row in zip(actions, self.program.pairs)]
        self.plays_left = BUDGET // sum(map(len, actions))

    def makespan(self, counts: Counts) -> float:
        return max(self._play(counts)[0])

    def fill(self, share: float) -> Counts:
        """The places that follow from a rule: a W wherever a rank waits for longer than this share of one, and where it
        may hold no more."""
        counts = [[0] * (len(row) + 1) for row in self.durations]
        num_done, num_deferred, num_held = ([0 for _ in self.ranks] for _ in range(3))

        def begin(rank: int, index: int, clock: float, arrival: float) -> float:
            change, weights = self.held[rank][index], self.weights[rank]
            is_full = change > 0 and num_held[rank] >= self.max_held
            while (
                index not in self.closed[rank]
                and num_done[rank] < num_deferred[rank]
                and (
                    is_full
                    or num_done[rank] < self.deadlines[rank][index]
                    or arrival - clock > share * weights[num_done[rank]] + 1e-9
                )
            ):
                clock += weights[num_done[rank]]
                num_done[rank] += 1
                num_held[rank] -= 1
                counts[rank][index] += 1
                is_full = False
            num_held[rank] += change
            num_deferred[rank] += self.kinds[rank][index] == WEIGHTS.after
            return clock

        self._run(begin)
        for rank in self.ranks:
            counts[rank][-1] = len(self.weights[rank]) - num_done[rank]
        return counts

    def improve(self, counts: Counts) -> Counts:
        """Move one W at a time that lies in the way of what decides the makespan, for as long as that helps."""
        shortest = self.makespan(counts)
        moved = True
        while moved:
            moved = False
            for rank, source, target in self._moves(counts):
                row = counts[rank].copy()
                row[source] -= 1
                row[target] += 1
                if not self._can_hold(rank, row):
                    continue
                if self.plays_left <= 0:
                    return counts
                trial = [*counts[:rank], row, *counts[rank + 1 :]]
                makespan = self.makespan(trial)
                if makespan < shortest - 1e-9:
                    counts, shortest, moved = trial, makespan, True
                    break
        return counts

    def _play(self, counts: Counts) -> tuple[list[float], list[list[float]]]:
        """When each rank ends, and how long it waits before each of its Fs and Bs (negative: how late it is)."""
        waits = [[0.0] * len(row) for row in self.durations]
        num_done = [0 for _ in self.ranks]

        def begin(rank: int, index: int, clock: float, arrival: float) -> float:
            for _ in range(counts[rank][index]):
                clock += self.weights[rank][num_done[rank]]
                num_done[rank] += 1
            waits[rank][index] = arrival - clock
            return clock

        ends = self._run(begin)
        return [end + sum(self.weights[rank][num_done[rank] :]) for rank, end in enumerate(ends)], waits

    def _run(self, begin: Callable[[int, int, float, float], float]) -> list[float]:
        """When each rank ends its last F or B."""
        self.plays_left -= 1
        clocks = [0.0 for _ in self.ranks]
        run(self.program, self.durations, clocks, begin, self.tails, **self.of_messages)
        return clocks

    def _can_hold(self, rank: int, row: list[int]) -> bool:
        """Whether every W comes after its B, before too much is held, and between no two halves of a pair."""
        num_held = num_deferred = num_done = 0
        if any(row[index] for index in self.closed[rank]):
            return False
        for kind, change, count, deadline in zip(self.kinds[rank], self.held[rank], row, self.deadlines[rank]):
            num_done += count
            num_held -= count
            if not deadline <= num_done <= num_deferred:
                return False
            num_held += change
            num_deferred += kind == WEIGHTS.after
            if num_held > self.max_held:
                return False
        return True

    def _moves(self, counts: Counts) -> list[tuple[int, int, int]]:
        """(rank, from, to): Ws on the critical path, and where else they could be: where the rank waits, or later."""
        ends, waits = self._play(counts)
        rank = max(self.ranks, key=ends.__getitem__)
        last = len(waits[rank])
        holes = sorted((k for k in range(last) if waits[rank][k] > 1e-9), key=lambda k: -waits[rank][k])
        moves = [(rank, last, hole) for hole in holes[:12]] if counts[rank][last] else []
        unseen, seen = [(rank, last - 1)], set()
        while unseen:
            rank, k = unseen.pop()
            if k < 0 or (rank, k) in seen:
                continue
            seen.add((rank, k))
            if waits[rank][k] > 1e-9:
                unseen += self._senders(rank, k)
                continue
            if counts[rank][k]:
                last = len(waits[rank])
                holes = sorted(
                    (hole for hole in range(last) if waits[rank][hole] > 1e-9), key=lambda hole: abs(hole - k)
                )
                targets = dict.fromkeys([*range(k + 1, min(k + 4, last)), *holes[:6], last])
                moves += [(rank, k, target) for target in targets if target != k]
            unseen.append((rank, k - 1))
        return moves

    def _senders(self, rank: int, index: int) -> list[tuple[int, int]]:
        """Rank and index of the actions whose messages an action waits for; the first of a pair waits for both."""
        sources, waiting = self.program.sources[rank], [index]
        if self.tails is not None and index in self.program.pairs[rank]:
            waiting.append(self.program.pairs[rank][index])
        return [self.program.senders[sources[each]] for each in waiting if sources[each] >= 0]
