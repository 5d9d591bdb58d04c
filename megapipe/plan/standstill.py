"""How far a step goes that does not come to its end: what each rank has done by then, and where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .check import waits_of
from .finding import AnySchedule, find_schedule
from .plan import Plan
from .program import run
from .recorder import Event, PlanRecorder
from .simulation import Costs, Span
from .verbs import Action, Settings


@dataclass(frozen=True)
class Standstill:
    """A step that does not come to its end.

    Attributes:
        plan: what the ranks call, of a rank that stops with an error what it has called by then.
        spans: by rank, the actions that it gets through.
        stands_at: by rank, the action that it waits at; None for one that waits for nothing.
        reasons: by rank, why it stands there, in words; "" for one that has come to its end.
    """

    plan: Plan
    spans: list[list[Span]]
    stands_at: list[Action | None]
    reasons: list[str]

    @property
    def end(self) -> float:
        """When the last rank stands."""
        return max((row[-1].end for row in self.spans if row), default=0.0)


def whole_units(plan: Plan) -> Costs:
    """Times with which each action of a plan takes a unit, and a whole backward two."""
    time = float(plan.num_chunks * plan.num_slices)
    return Costs(time, time, time)


def stand_still(plan: Plan, errors: Sequence[str] = (), costs: Costs | None = None) -> Standstill:
    """Play a plan as far as it goes.

    Args:
        errors: by rank, the error that it has stopped with behind its last action; "" for none.
        costs: the times of actions and messages. None where F, B and W take equally long.
    """
    costs = costs or Costs()
    durations, tails = costs.hidden(plan)
    no_tails = [[0.0] * len(row) for row in plan.actions]
    starts, ends = run(
        plan.program, durations, [0.0] * plan.pp_size, None, tails or no_tails, **costs.of_messages(plan)
    )
    waits = waits_of(plan, list(map(len, ends)), errors)
    reasons = [str(waits[rank]) if rank in waits else "" for rank in range(plan.pp_size)]
    for rank, error in enumerate(errors):
        reasons[rank] = reasons[rank] or error
    spans = [list(map(Span, *row)) for row in zip(plan.actions, starts, ends)]
    return Standstill(plan, spans, [waits[r].action if r in waits else None for r in range(plan.pp_size)], reasons)


def record_partly(
    schedule: AnySchedule,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    num_slices: int = 1,
    settings: Settings | None = None,
) -> tuple[Plan, list[str]]:
    """Record each rank of a schedule up to its first error.

    Returns:
        The plan of what was recorded, and by rank the error; "" for none.
    """
    found = find_schedule(schedule)
    sizes = (pp_size, num_microbatches, found.check(pp_size, num_chunks), found.forward_only)
    events: list[list[Event]] = []
    errors = []
    for rank in range(pp_size):
        recorder = PlanRecorder(found.placement, rank, *sizes, settings, num_slices)
        error = ""
        try:
            found.loops(recorder)
            recorder.finish()
        except Exception as caught:
            error = str(caught) or type(caught).__name__
        events.append(recorder.events)
        errors.append(error)
    return Plan(found.name, found.placement, *sizes, events, num_slices), errors
