"""Where the Ws go, decided on the plan: F, B and W never take exactly the same time, so a fixed place leaves holes.

A W may run at any time after its B, at no change to any message. So the order of a rank's Fs and Bs stays the
schedule's, and its Ws follow in the order of its Bs; only how many Ws run before each F and B is chosen, by rules that
play the whole pipeline through time. A single rule makes some schedules faster and others slower: the best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from .kinds import KINDS, WEIGHTS, kind_of
from .memory import held_changes
from .plan import Plan
from .program import run
from .recorder import Event
from .simulation import Costs, simulate
from .verbs import Action

FILLS = (1.0, 0.75, 0.5, 0.25, 0.0)
"""How long, in Ws, a wait must be to be filled with one. 1 delays no rank, 0 fills every wait."""

GAIN = 0.005
"""Share of the makespan that other places must gain. Less than that disappears in the noise of measured steps
(benchmarks/TABLES.md)."""

SLACK = 1 / 4
"""How much more a rank may hold than by the schedule, without a limit: this share of a pipeline's microbatches."""


def place_weights(plan: Plan, costs: Costs, max_held: float | None = None) -> Plan:
    """`plan` with its Ws where they make one step shortest; `plan` itself where that gains less than half a percent, or
    where it moves activations to host memory, for then they are timed by its Ws. The same arguments give the same
    places.

    Args:
        plan: a plan that can run.
        costs: the times to judge by, those of `simulate`.
        max_held: most microbatches of a whole rank that a rank may have in flight, from F to W. None for a quarter of
            the number of ranks more than in `plan`.
    """
    if any(plan.offloaded) or not any(action.kind == WEIGHTS.name for row in plan.actions for action in row):
        return plan
    own = simulate(plan, costs)
    if max_held is None:
        max_held = max(own.peak_activations) + SLACK * plan.pp_size
    filled = [fill(plan, costs, max_held, share) for share in FILLS]
    shortest, place = min((simulate(one, costs).makespan, index) for index, one in enumerate(filled))
    return filled[place] if shortest < (1 - GAIN) * own.makespan else plan


def fill(plan: Plan, costs: Costs, max_held: float, share: float) -> Plan:
    """`plan` with a W wherever a rank waits for longer than this share of one, and where it may hold no more."""
    unweighted = replace(plan, events=[[e for e in row if e.verb != WEIGHTS.verb] for row in plan.events])
    most = int(max_held * plan.num_chunks * plan.num_slices + 1e-9)
    duration, actions, program = costs.of_actions(plan), unweighted.actions, unweighted.program
    weights = [[duration(a._replace(kind=WEIGHTS.name)) for a in row if a.kind == WEIGHTS.after] for row in actions]
    held = [held_changes(row) for row in actions]
    closed = [set(pairs.values()) for pairs in program.pairs]  # no W runs between the halves of an overlapped pair
    deadlines = [_deadlines(*row) for row in zip(actions, program.pairs)]
    counts = [[0] * len(row) for row in actions]  # how many Ws run before each F and B
    num_done, num_deferred, num_held = ([0] * plan.pp_size for _ in range(3))

    def begin(rank: int, index: int, clock: float, arrival: float) -> float:
        change = held[rank][index]
        is_full = change > 0 and num_held[rank] >= most
        while (
            index not in closed[rank]
            and num_done[rank] < num_deferred[rank]
            and (
                is_full
                or num_done[rank] < deadlines[rank][index]
                or arrival - clock > share * weights[rank][num_done[rank]] + 1e-9
            )
        ):
            clock += weights[rank][num_done[rank]]
            num_done[rank] += 1
            num_held[rank] -= 1
            counts[rank][index] += 1
            is_full = False
        num_held[rank] += change
        num_deferred[rank] += actions[rank][index].kind == WEIGHTS.after
        return clock

    durations, tails = costs.hidden(unweighted)
    run(program, durations, [0.0] * plan.pp_size, begin, tails, **costs.of_messages(plan))
    return replace(plan, events=[list(_merge(*row)) for row in zip(unweighted.events, counts)])


def _merge(events: Sequence[Event], counts: Sequence[int]) -> Iterator[Event]:
    """The events of a rank and its Ws, in the order of the Bs: so many before each F and B, and the others at the
    end."""
    deferring = [event for event in events if (kind := kind_of(event.verb)) and kind.name == WEIGHTS.after]
    weights = (event._replace(verb=WEIGHTS.verb) for event in deferring)
    num_before = iter(counts)
    for event in events:
        if kind_of(event.verb) is not None:
            yield from (next(weights) for _ in range(next(num_before)))
        yield event
    yield from weights


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
