"""Checks that a plan can run: every message arrives as the one that was sent, and no rank waits for ever."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .kinds import KINDS, kind_of
from .plan_facts import PlanFacts
from .program import run
from .recorder import ChannelName, PlanRecorder
from .verbs import Action, ScheduleError, unit_in_words, unit_name


def check_channels(plan: PlanFacts) -> None:
    """`Plan.check`, with one channel per boundary and direction."""
    _check_messages(plan)
    _check_hand_overs(plan)
    _check_order(plan)
    _check_waits(plan)


def _check_messages(plan: PlanFacts) -> None:
    """A channel's messages are received in the order in which they are sent."""
    sent: defaultdict[ChannelName, list[tuple[int, int]]] = defaultdict(list)
    received: defaultdict[ChannelName, list[tuple[int, int]]] = defaultdict(list)
    for event in (event for events in plan.events for event in events if kind_of(event.verb) is None):
        (sent if event.sends else received)[event.channel].append((event.microbatch, event.slice))
    for kind in ("forward", "backward"):
        for boundary in range(plan.pp_size * plan.num_chunks - 1):
            channel = ChannelName(kind, boundary)
            if sent[channel] != received[channel]:
                raise ScheduleError(
                    f"{plan.name} sends {kind} over the boundary between stages {boundary} and {boundary + 1} the "
                    f"microbatches {_listed(sent[channel])}, but {_listed(received[channel])} are received."
                )


def _listed(units: Sequence[tuple[int, int]]) -> str:
    return f"[{', '.join(unit_name(*unit) for unit in units)}]"


def _check_hand_overs(plan: PlanFacts) -> None:
    """A stage takes nothing from another one of its own rank before it is there."""
    for rank, events in enumerate(plan.events):
        stages = {info.index for info in plan.placement.stages(rank, plan.pp_size, plan.num_chunks)}
        if not any(stage + 1 in stages for stage in stages):
            continue
        sent: set[tuple[ChannelName, int, int]] = set()
        for event in events:
            if event.sends:
                sent.add(event.message)
            elif kind_of(event.verb) is None and event.message not in sent:
                stage = event.stage + (-1 if event.is_forward else 1)
                if plan.has_stage(stage) and plan.rank_of(stage) == rank:
                    needed = event._replace(verb=f"send_{event.channel.kind}", stage=stage)
                    raise ScheduleError(
                        f"{plan.name} takes {event} on rank {rank} before {needed}, which is on the same rank."
                    )


def _check_order(plan: PlanFacts) -> None:
    """Each rank does everything once, each step after the one before it, and one microbatch after the other: a slice
    goes forward after those before it, whose keys and values it needs, and backward after those behind it, which have
    added to the gradients of its own."""
    sizes = (plan.pp_size, plan.num_microbatches, plan.num_chunks, plan.forward_only)
    for rank, events in enumerate(plan.events):
        recorder = PlanRecorder(plan.placement, rank, *sizes, None, plan.num_slices)
        try:
            for event in events:
                kind, chunk = kind_of(event.verb), plan.chunk_of(event.stage)
                if kind is None:
                    getattr(recorder, event.verb)(chunk)
                else:
                    recorder.run(kind.name, chunk, plan.number_in_backwards(event) if kind.is_optional else None)
            recorder.finish()
        finally:  # a wrong unit comes before whatever follows from it
            for event, expected in zip(events, recorder.events):
                if (expected.microbatch, expected.slice) != (event.microbatch, event.slice):
                    raise ScheduleError(f"{plan.name} has {event} on rank {rank} where {expected} is next.")


def _check_waits(plan: PlanFacts) -> None:
    """No rank waits for ever. An overlapped pair begins when both of its messages are there."""
    no_time = [[0.0] * len(actions) for actions in plan.actions]
    _, ends = run(plan.program, no_time, [0.0] * plan.pp_size, tails=no_time)
    check_ended(plan, ends)


def check_ended(plan: PlanFacts, ends: Sequence[Sequence[float]]) -> None:
    """Raises ScheduleError where ranks did not get through all of their actions when they were run, and says for what
    they wait."""
    num_done = list(map(len, ends))
    if waits := waits_of(plan, num_done):
        raise ScheduleError(f"{plan.name} would hang: {'; '.join(map(str, waits.values()))}.")


@dataclass(frozen=True)
class Blocked:
    """What keeps a rank from going on."""

    rank: int
    action: Action
    message: str
    """What it waits for, in words."""
    peer: int
    """The rank that it waits for."""
    place: str
    """Where that one is, in words."""

    def __str__(self) -> str:
        return (
            f"rank {self.rank} waits at {self.action} for the {self.message} from rank {self.peer}, which {self.place}"
        )


def waits_of(plan: PlanFacts, num_done: Sequence[int], errors: Sequence[str] = ()) -> dict[int, Blocked]:
    """What keeps ranks from their next actions, by rank, where each has got through so many of its own.

    Args:
        errors: by rank, the error that it stops with behind its last action; "" for none.
    """
    program = plan.program
    sent = {
        message
        for rank, n in enumerate(num_done)
        for message in program.sent[rank][: program.sent_until[rank][n - 1] if n else 0]
    }
    waits = {}
    for rank, index in enumerate(num_done):
        if index < len(plan.actions[rank]):
            for waiting in (index, program.pairs[rank].get(index, index)):
                source = program.sources[rank][waiting]
                if source >= 0 and source not in sent:
                    waits[rank] = _wait_of(plan, rank, waiting, num_done, errors)
                    break
    return waits


def _wait_of(plan: PlanFacts, rank: int, index: int, num_done: Sequence[int], errors: Sequence[str]) -> Blocked:
    action = plan.actions[rank][index]
    is_forward = KINDS[action.kind].is_forward
    what = "forward input" if is_forward else "output gradient"
    peer = plan.rank_of(action.stage + (-1 if is_forward else 1))
    others = plan.actions[peer]
    if num_done[peer] < len(others):
        place = f"waits at {others[num_done[peer]]}"
    else:
        place = "stops with an error" if any(errors[peer : peer + 1]) else "has ended its step"
    unit = unit_in_words(action.microbatch, action.slice, plan.num_slices)
    return Blocked(rank, action, f"{what} of {unit}", peer, place)
