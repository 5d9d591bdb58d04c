"""Decides which chunks of a rank have their parameters gathered, if these are sharded over replicas.

With a limit these are the chunk of the action and those that come next, so that what is gathered ahead is used next,
and what is sharded again is used latest: no other choice gathers less often.
"""

from __future__ import annotations

from .kinds import KINDS
from .plan_facts import PlanFacts


def gathered_chunks(plan: PlanFacts, rank: int, most: int | None = None) -> list[tuple[int, ...]]:
    """The chunks whose parameters are gathered in each action of a rank, by their next use.

    Args:
        most: how many at a time; an overlapped pair has those of both its chunks in any case. None for each from the
            first forward of the chunk before it to its last action, and that of all later chunks, since gradients
            are reduced from the last chunk to the first.
    """
    actions = plan.actions[rank]
    chunks = [plan.chunk_of(action.stage) if KINDS[action.kind].costs else None for action in actions]
    if most is None:
        return _whole(chunks, plan.num_chunks)
    gathered: list[tuple[int, ...]] = [()] * len(chunks)
    order: list[int] = []  # the chunks that are still to be used, by their next use
    for at in reversed(range(len(chunks))):
        if (chunk := chunks[at]) is not None:
            order = [chunk, *(other for other in order if other != chunk)]
        gathered[at] = tuple(order[:most])
    for first, second in plan.program.pairs[rank].items():
        both = tuple(dict.fromkeys(gathered[first][:1] + gathered[second]))
        gathered[first] = gathered[second] = both[: max(2, most)]
    return gathered


def _whole(chunks: list[int | None], num_chunks: int) -> list[tuple[int, ...]]:
    first = [chunks.index(chunk) for chunk in range(num_chunks)]
    ends = [len(chunks) - 1 - chunks[::-1].index(chunk) for chunk in range(num_chunks)]
    last = [max(ends[chunk:]) for chunk in range(num_chunks)]
    return [
        tuple(chunk for chunk in range(num_chunks) if first[max(0, chunk - 1)] <= at <= last[chunk])
        for at in range(len(chunks))
    ]
