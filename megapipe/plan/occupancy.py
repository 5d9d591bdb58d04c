"""How many messages occupy a device at a time, while they wait for the other rank.

Over NCCL a receive is a kernel on a few multiprocessors, which computations beside it lack, and so is a send larger
than NCCL's buffers. All messages from one rank to another share a communicator, which runs them one after the other,
and nothing is received before a step needs it. So the plan says how many wait at a time, whatever the number of chunks
and microbatches.
"""

from __future__ import annotations

from .facts import PlanFacts
from .kinds import is_overlapped
from .verbs import ScheduleError

__all__ = ["check_occupancy", "peak_waiting"]


def peak_waiting(plan: PlanFacts, rank: int) -> int:
    """`Plan.peak_waiting`."""
    most = 0
    senders: set[int] = set()
    in_pair = False
    row = plan.rows[rank]
    halves = [is_overlapped(verb) for verb, _ in row.words]
    needed = map(plan.needs, row.first_of_words())
    awaited = [None if event is None else plan.rank_of(event.stage) for event in needed]
    for code in row.codes:
        if not in_pair:  # the second of a pair waits together with the first
            senders = set()
        in_pair ^= halves[code]
        if (sender := awaited[code]) is not None and sender != rank:
            senders.add(sender)
            most = max(most, len(senders))
    return most + sum(sender == rank for sender, _ in plan.traffic)


def check_occupancy(plan: PlanFacts, max_waiting: int) -> None:
    """Raises ScheduleError where more messages may wait on a device."""
    for rank in range(plan.pp_size):
        if (most := peak_waiting(plan, rank)) > max_waiting:
            raise ScheduleError(
                f"{plan.name} may have {most} messages wait on the device of rank {rank} at a time, more than "
                f"{max_waiting}: place its stages so that the rank has fewer neighbours."
            )
