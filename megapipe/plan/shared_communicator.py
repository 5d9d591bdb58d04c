"""A plan whose messages all share one communicator, as they do in one NCCL process group.

Each rank then has one stream of messages, run in the order of the calls, and a message is paired with the next one of
the other rank's stream: no tag tells which message it is. Computation runs beside the stream and waits for what it
receives. By this model channels were chosen, one per boundary and direction; it is here to show why.
"""

from __future__ import annotations

from .facts import PlanFacts
from .recorder import ChannelName
from .verbs import ScheduleError

__all__ = ["check_shared_communicator"]


def check_shared_communicator(plan: PlanFacts) -> None:
    """Raises ScheduleError where the plan would hang, or a rank would receive another message than it asked for."""
    streams = [plan.messages(rank) for rank in range(plan.pp_size)]
    computations = [[event for event in events if event.action is not None] for events in plan.events]
    heads = [0] * plan.pp_size  # the message each rank is at
    done = [0] * plan.pp_size  # computations each rank has done
    made: set[tuple[ChannelName, int, int]] = set()
    received: set[tuple[ChannelName, int, int]] = set()
    progress = True
    while progress:
        progress = False
        for rank in range(plan.pp_size):
            while done[rank] < len(computations[rank]):
                event = computations[rank][done[rank]]
                needed = plan.needs(event)
                if needed is not None and needed.message not in (
                    made if plan.rank_of(needed.stage) == rank else received
                ):
                    break
                made.add(event._replace(verb="send_forward" if event.is_forward else "send_backward").message)
                done[rank] += 1
                progress = True
            if heads[rank] == len(streams[rank]):
                continue
            event = streams[rank][heads[rank]]
            peer = plan.peer(rank, event)
            assert peer is not None
            if not event.sends or event.message not in made or heads[peer] == len(streams[peer]):
                continue
            answer = streams[peer][heads[peer]]
            if answer.sends or plan.peer(peer, answer) != rank:
                continue
            if answer.message != event.message:
                raise ScheduleError(
                    f"{plan.name} on one communicator mixes messages up: rank {rank} sends {event}, and rank {peer} "
                    f"receives it as {answer}."
                )
            received.add(event.message)
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
