"""What would become of a plan if all its messages shared one communicator, as they do in one NCCL process group.

Then each rank has one stream of messages, which it works off in the order in which they were called for, and a message
is paired with whatever the other rank does next with this one: no tag tells which message it is. Computation runs
beside it, and waits for what it receives. This is the model by which channels were chosen, one per boundary and
direction; it is here so that one can see why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .verbs import ScheduleError

if TYPE_CHECKING:
    from .plan import Event, Plan

__all__ = ["check_shared_communicator"]


def check_shared_communicator(plan: Plan) -> None:
    """Raises ScheduleError where the plan would hang, or a rank would receive another message than it asked for."""
    streams = [plan.messages(rank) for rank in range(plan.pp_size)]
    computations = [[event for event in events if event.action is not None] for events in plan.events]
    heads = [0] * plan.pp_size  # the message each rank is at
    done = [0] * plan.pp_size  # computations each rank has done
    finished: set[Event] = set()
    progress = True
    while progress:
        progress = False
        for rank in range(plan.pp_size):
            while done[rank] < len(computations[rank]) and _ready(plan, rank, computations[rank][done[rank]], finished):
                finished.add(computations[rank][done[rank]])
                done[rank] += 1
                progress = True
            if heads[rank] == len(streams[rank]):
                continue
            event = streams[rank][heads[rank]]
            peer = plan.peer(rank, event)
            assert peer is not None
            if not event.sends or _maker(event) not in finished or heads[peer] == len(streams[peer]):
                continue
            answer = streams[peer][heads[peer]]
            if answer.sends or plan.peer(peer, answer) != rank:
                continue
            if answer != _matching_receive(event):
                raise ScheduleError(
                    f"{plan.name} on one communicator mixes messages up: rank {rank} sends {event}, and rank {peer} "
                    f"receives it as {answer}."
                )
            finished.add(answer)
            heads[rank] += 1
            heads[peer] += 1
            progress = True
    stuck = [rank for rank in range(plan.pp_size) if heads[rank] < len(streams[rank])]
    if stuck:
        waits = "; ".join(
            f"rank {rank} is at {streams[rank][heads[rank]]} with rank {plan.peer(rank, streams[rank][heads[rank]])}"
            for rank in stuck
        )
        raise ScheduleError(f"{plan.name} on one communicator would hang: {waits}.")


def _ready(plan: Plan, rank: int, event: Event, finished: set[Event]) -> bool:
    """Whether what a computation needs is there."""
    needed = plan.needs(event)
    if needed is None:
        return True
    if plan.rank_of(needed.stage) == rank:
        return _maker(needed) in finished
    return _matching_receive(needed) in finished


def _maker(send: Event) -> Event:
    """The computation whose result is sent."""
    return send._replace(verb="forward_step" if send.is_forward else "backward_step")


def _matching_receive(send: Event) -> Event:
    if send.is_forward:
        return send._replace(verb="recv_forward", stage=send.stage + 1)
    return send._replace(verb="recv_backward", stage=send.stage - 1)
