"""A schedule written down: what every rank does, in which order, without a process group or a tensor.

The plan comes from running the schedule function itself on a `PlanRecorder`, once per rank, so it cannot differ from
what a `Pipeline` does.
"""

from __future__ import annotations

import csv
import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from .placement import Placement, loop, v_shape
from .registry import Schedule, find_schedule
from .shared_communicator import check_shared_communicator
from .simulation import Costs, PerStage, Simulation, peak_memory, play, simulate
from .verbs import PAIR, Action, ScheduleError, Settings, Verbs

__all__ = ["ChannelName", "Event", "Plan", "PlanRecorder", "make_plan", "plan_of"]

ACTION_KINDS = {
    "forward_step": "F",
    "backward_step": "BW",
    "backward_input_step": "B",
    "backward_weight_step": "W",
    PAIR[0]: "F",
    PAIR[1]: "BW",
}


class Event(NamedTuple):
    """One call of a verb."""

    verb: str
    stage: int
    microbatch: int

    @property
    def action(self) -> Action | None:
        """The computation, if it is one."""
        kind = ACTION_KINDS.get(self.verb)
        return None if kind is None else Action(self.stage, kind, self.microbatch)

    @property
    def sends(self) -> bool:
        return self.verb.startswith("send")

    @property
    def is_forward(self) -> bool:
        return "forward" in self.verb

    def __str__(self) -> str:
        """`1RECV_F0` is the receive of stage 1's input of microbatch 0, `1SEND_B0` the send of its gradient."""
        action = self.action
        if action is not None:
            return str(action)
        letter = "F" if self.is_forward else "B"
        return f"{self.stage}{self.verb.partition('_')[0].upper()}_{letter}{self.microbatch}"


class ChannelName(NamedTuple):
    """One way over one boundary, as both of its ends call it."""

    kind: str
    """"forward" for outputs, "backward" for their gradients, "header" for the shapes that precede an output."""
    boundary: int
    """Boundary b lies between the stages b and b + 1."""


class Instruction(NamedTuple):
    """An event, its computation if it is one and the send which that waits for, and whether it goes to another rank."""

    event: Event
    action: Action | None
    needed: Event | None
    crosses: bool


class PlanRecorder(Verbs):
    """Writes down what a schedule calls on one rank."""

    def __init__(
        self,
        placement: Placement,
        pp_rank: int,
        pp_size: int,
        num_microbatches: int,
        num_chunks: int,
        forward_only: bool = False,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(placement, pp_rank, pp_size, num_microbatches, num_chunks, forward_only, settings)
        self.events: list[Event] = []

    def recv_forward(self, chunk: int = 0) -> None:
        self._record("recv_forward", chunk)

    def forward_step(self, chunk: int = 0) -> None:
        self._record("forward_step", chunk)

    def send_forward(self, chunk: int = 0) -> None:
        self._record("send_forward", chunk)
        last = self.events[-3:]
        if [event.verb for event in last[:2]] == list(PAIR) and last[0].stage == last[2].stage:
            self.events[-2:] = [last[2], last[1]]  # it is sent as soon as it is there

    def recv_backward(self, chunk: int = 0) -> None:
        self._record("recv_backward", chunk)

    def backward_step(self, chunk: int = 0) -> None:
        self._record_backward("backward_step", chunk, deferred=False)

    def backward_input_step(self, chunk: int = 0) -> None:
        self._record_backward("backward_input_step", chunk, deferred=True)

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        if not self.forward_only:
            self._check_ready("backward_step", backward_chunk)
        microbatch = self._advance("forward_step", forward_chunk)
        self.events.append(Event(PAIR[0], self.stages[forward_chunk].index, microbatch))
        self._record_backward(PAIR[1], backward_chunk, deferred=False)

    def backward_weight_step(self, chunk: int | None = None) -> None:
        if not self.forward_only:
            chunk, microbatch = self._advance_weight(chunk)
            self.events.append(Event("backward_weight_step", self.stages[chunk].index, microbatch))

    def send_backward(self, chunk: int = 0) -> None:
        self._record("send_backward", chunk)

    def finish(self) -> None:
        self._check_finished()

    def _record(self, verb: str, chunk: int) -> None:
        if not (self.forward_only and "backward" in verb):
            microbatch = self._advance(verb, chunk)
            self.events.append(Event(verb, self.stages[chunk].index, microbatch))

    def _record_backward(self, verb: str, chunk: int, deferred: bool) -> None:
        if not self.forward_only:
            microbatch = self._advance_backward(chunk, deferred)
            self.events.append(Event(verb, self.stages[chunk].index, microbatch))


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step of a schedule."""

    name: str
    placement: Placement
    pp_size: int
    num_microbatches: int
    num_chunks: int
    forward_only: bool
    events: list[list[Event]]
    """Per rank, every call of a verb."""

    @cached_property
    def actions(self) -> list[list[Action]]:
        """Per rank, the computations in order; each prints like `2F0`."""
        return [[action for event in events if (action := event.action) is not None] for events in self.events]

    @property
    def sizes(self) -> dict[str, int]:
        return {"pp_size": self.pp_size, "num_microbatches": self.num_microbatches, "num_chunks": self.num_chunks}

    @property
    def num_messages(self) -> int:
        """How many messages travel between ranks in one step."""
        return sum(event.sends for rank in range(self.pp_size) for event in self.messages(rank))

    def messages(self, rank: int) -> list[Event]:
        """The sends and receives of a rank that go to, or come from, another one."""
        return [event for event in self.events[rank] if self.peer(rank, event) is not None]

    @cached_property
    def traffic(self) -> dict[tuple[int, int], list[ChannelName]]:
        """By sender and receiver, the channels of the messages that travel between them in one step, in the order in
        which they are sent."""
        traffic: dict[tuple[int, int], list[ChannelName]] = {}
        for rank in range(self.pp_size):
            for event in self.messages(rank):
                peer = self.peer(rank, event)
                if event.sends and peer is not None:
                    up = ChannelName("forward", event.stage)
                    name = up if event.is_forward else ChannelName("backward", event.stage - 1)
                    traffic.setdefault((rank, peer), []).append(name)
        return traffic

    def peer(self, rank: int, event: Event) -> int | None:
        """The other rank that an event of `rank` sends to or receives from; None where there is none."""
        stage = event.stage + (1 if event.sends == event.is_forward else -1)
        if event.action is not None or not self.has_stage(stage):
            return None
        peer = self.rank_of(stage)
        return None if peer == rank else peer

    def peak_in_flight(self, rank: int) -> int:
        """Most microbatches that `rank` holds between their F and their B at once, each chunk counted by itself."""
        num_stages = self.pp_size * self.num_chunks
        return round(peak_memory(self.actions[rank], [1.0] * num_stages, [0.0] * num_stages))

    def rank_of(self, stage: int) -> int:
        return self.placement.rank(stage, self.pp_size)

    def chunk_of(self, stage: int) -> int:
        return stage // self.pp_size

    def has_stage(self, stage: int) -> bool:
        return 0 <= stage < self.pp_size * self.num_chunks

    def needs(self, event: Event) -> Event | None:
        """The send that a computation waits for, if any."""
        verb, stage, microbatch = event
        kind = ACTION_KINDS.get(verb)
        if kind == "F" and self.has_stage(stage - 1):
            return Event("send_forward", stage - 1, microbatch)
        if kind in ("B", "BW") and self.has_stage(stage + 1):
            return Event("send_backward", stage + 1, microbatch)
        return None

    @cached_property
    def program(self) -> list[list[Instruction]]:
        """Per rank, its events with what a player has to know of each, looked up once."""
        last = self.pp_size * self.num_chunks - 1
        ranks = [self.rank_of(stage) for stage in range(last + 1)]
        crosses_up = [stage < last and ranks[stage] != ranks[stage + 1] for stage in range(last + 1)]
        crosses_down = [False, *crosses_up[:-1]]

        def look_up(event: Event) -> Instruction:
            verb, stage, microbatch = event
            kind = ACTION_KINDS.get(verb)
            if kind is None:
                crosses = (crosses_up if event.sends == event.is_forward else crosses_down)[stage]
                return Instruction(event, None, None, crosses)
            return Instruction(event, Action(stage, kind, microbatch), self.needs(event), False)

        return [[look_up(event) for event in events] for events in self.events]

    # Checking

    def check(self, *, shared_communicator: bool = False) -> None:
        """Prove that the plan cannot hang, and that every message is received as the one that was sent.

        The rules are those of rendezvous transports: a send occupies its channel until it is received, and a channel
        carries its messages in order. A rank waits where a computation needs a message.

        Args:
            shared_communicator: instead of one channel per boundary and direction, all messages of a rank share one
                communicator, which runs them one at a time in the order of the calls and pairs them by rank alone.
                Most schedules hang or mix messages up there: it is why channels exist.

        Raises ScheduleError that says which rank would wait where, and for what; and where something is missing, there
        twice, or comes before what it needs on the same rank.
        """
        if shared_communicator:
            check_shared_communicator(self)
            return
        self._check_messages()
        self._check_hand_overs()
        # An overlapped pair may not begin before both of its messages are there.
        costs = Costs(overlap=1.0)
        position = play(self, lambda action: 1.0, costs, [0.0] * self.pp_size, [[] for _ in self.events])
        stuck = {rank: position[rank] for rank, events in enumerate(self.events) if position[rank] < len(events)}
        if stuck:
            waits = "; ".join(self._describe_wait(rank, stuck) for rank in stuck)
            raise ScheduleError(f"{self.name} would hang: {waits}.")
        self._check_order()

    def _check_order(self) -> None:
        """Each rank does everything once, in an order that makes sense, and one microbatch after the other. That is so
        of what a schedule says, but not of every file."""
        verbs = {PAIR[0]: "forward_step", PAIR[1]: "backward_step"}
        sizes = (self.pp_size, self.num_microbatches, self.num_chunks, self.forward_only)
        for rank, events in enumerate(self.events):
            recorder = PlanRecorder(self.placement, rank, *sizes)
            for event in events:
                getattr(recorder, verbs.get(event.verb, event.verb))(self.chunk_of(event.stage))
                if recorder.events[-1].microbatch != event.microbatch:
                    raise ScheduleError(f"{self.name} has {event} on rank {rank} where {recorder.events[-1]} is next.")
            recorder.finish()

    def _check_messages(self) -> None:
        """What a channel carries must be what its receiver takes, in the same order."""
        sent: dict[tuple[bool, int], list[int]] = {}  # by direction and boundary
        taken: dict[tuple[bool, int], list[int]] = {}
        for event in (event for events in self.events for event in events if event.action is None):
            boundary = event.stage if event.is_forward == event.sends else event.stage - 1
            messages = sent if event.sends else taken
            messages.setdefault((event.is_forward, boundary), []).append(event.microbatch)
        for forward in (True, False):
            for boundary in range(self.pp_size * self.num_chunks - 1):
                went, came = (messages.get((forward, boundary), []) for messages in (sent, taken))
                if went != came:
                    raise ScheduleError(
                        f"{self.name} sends {'forward' if forward else 'backward'} over the boundary between stages "
                        f"{boundary} and {boundary + 1} the microbatches {went}, but {came} are received."
                    )

    def _check_hand_overs(self) -> None:
        """Between two stages of one rank nothing can be taken before it is there."""
        for rank, events in enumerate(self.events):
            sent: set[Event] = set()
            for event in events:
                if event.sends:
                    sent.add(event)
                elif event.action is None:
                    stage = event.stage + (-1 if event.is_forward else 1)
                    needed = event._replace(verb=f"send_{event.verb.partition('_')[2]}", stage=stage)
                    if self.has_stage(stage) and self.rank_of(stage) == rank and needed not in sent:
                        raise ScheduleError(
                            f"{self.name} takes {event} on rank {rank} before {needed}, which is on the same rank."
                        )

    def _describe_wait(self, rank: int, stuck: dict[int, int]) -> str:
        event = self.events[rank][stuck[rank]]
        needed = self.needs(event)
        assert needed is not None
        what = "forward input" if event.is_forward else "output gradient"
        peer = self.rank_of(needed.stage)
        place = f"waits at {self.events[peer][stuck[peer]]}" if peer in stuck else "has ended its step"
        what += f" of microbatch {event.microbatch}"
        return f"rank {rank} waits at {event} for the {what} from rank {peer}, which {place}"

    # Playing

    def simulate(
        self,
        forward: PerStage = 1.0,
        backward_input: PerStage = 1.0,
        backward_weight: PerStage = 1.0,
        p2p: float = 0.0,
        *,
        message: float = 0.0,
        overlap: float = 0.0,
        optimizer: float = 0.0,
        num_steps: int = 1,
        synchronize: bool = False,
        activation_bytes: PerStage = 0.0,
        deferred_bytes: PerStage = 0.0,
    ) -> Simulation:
        """Play the plan through time.

        Args:
            forward, backward_input, backward_weight, p2p, message, overlap, optimizer: see `Costs`.
            num_steps: consecutive steps, which overlap as they do without a barrier between them.
            synchronize: the optimizer waits for every rank's gradients, to clip them by their common norm.
            activation_bytes, deferred_bytes: what a microbatch occupies between F and B, and between B and W: a number
                is that of a whole rank, a list has those of each stage. They make `peak_bytes`.
        """
        costs = Costs(forward, backward_input, backward_weight, p2p, message, optimizer, overlap)
        return simulate(self, costs, num_steps, synchronize, activation_bytes, deferred_bytes)

    # Files

    def save_csv(self, path: str | Path) -> None:
        """One row per rank, one action per cell, in the form that torch.distributed.pipelining reads: it calls a
        backward B only if that is a whole one, and the part for the input I."""
        with open(path, "w", newline="") as file:
            for actions in self.actions:
                cells = [a._replace(kind="I") if a.kind == "B" else a for a in actions]
                csv.writer(file).writerow(cells)

    def save_json(self, path: str | Path) -> None:
        content = {"name": self.name, **self.sizes, "placement": self.placement.name}
        content["actions"] = [[str(action) for action in rank] for rank in self.actions]
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def make_plan(
    schedule: str | Schedule,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    forward_only: bool = False,
    settings: Settings | None = None,
) -> Plan:
    """Record `schedule` for every rank of a pipeline.

    Args:
        schedule: a name, or a function decorated with `@schedule`.
        num_chunks: stages per rank; None takes the schedule's own.
        settings: what else the schedule is told.

    Raises ValueError on an unknown name or impossible sizes, TypeError where those are no whole numbers, ScheduleError
    where the schedule is wrong in itself.
    """
    found = find_schedule(schedule)
    pp_size, num_microbatches = _whole("pp_size", pp_size), _whole("num_microbatches", num_microbatches)
    num_chunks = found.check(pp_size, None if num_chunks is None else _whole("num_chunks", num_chunks))
    if pp_size < 1 or num_microbatches < 1:
        raise ValueError(f"a plan needs at least 1 rank and 1 microbatch, got {pp_size} and {num_microbatches}.")
    _check_placement(found.placement, pp_size, num_chunks)
    forward_only = forward_only or found.forward_only
    events = []
    for rank in range(pp_size):
        recorder = PlanRecorder(found.placement, rank, pp_size, num_microbatches, num_chunks, forward_only, settings)
        found.loops(recorder)
        events.append(recorder.events)
    plan = Plan(found.name, found.placement, pp_size, num_microbatches, num_chunks, forward_only, events)
    if settings is not None and settings.max_in_flight is not None:
        in_flight = max(plan.simulate().peak_activations)
        if in_flight > settings.max_in_flight + 1e-9:
            raise ValueError(
                f"{found.name} has up to {in_flight:g} microbatches in flight on {pp_size} ranks, more than "
                f"max_in_flight = {settings.max_in_flight:g}: allow more, or choose a schedule with "
                "fewer, such as v_min or v_half."
            )
    return plan


def _whole(name: str, size: int) -> int:
    try:
        return operator.index(size)
    except TypeError:
        raise TypeError(f"{name} is a whole number, got {size!r}, a {type(size).__name__}.") from None


def _check_placement(placement: Placement, pp_size: int, num_chunks: int) -> None:
    for rank in range(pp_size):
        for info in placement.stages(rank, pp_size, num_chunks):
            if (found := placement.rank(info.index, pp_size)) != rank:
                raise ValueError(
                    f"the placement {placement.name!r} is not its own inverse: on {pp_size} ranks stage {info.index} "
                    f"is on rank {rank} by its position, but that of rank {found} by the inverse. See Placement."
                )


def plan_of(name: str, actions: Sequence[Sequence[Action]]) -> Plan:
    """The plan in which each rank runs these actions: each receives what it needs just before and sends what it made
    just after."""
    placement, num_chunks = _find_placement(actions)
    kinds = {action.kind for row in actions for action in row}
    return Plan(
        name,
        placement,
        len(actions),
        1 + max(action.microbatch for row in actions for action in row),
        num_chunks,
        kinds == {"F"},
        [[event for action in row for event in _events_around(action)] for row in actions],
    )


def _find_placement(actions: Sequence[Sequence[Action]]) -> tuple[Placement, int]:
    held = [{action.stage for action in row} for row in actions]
    pp_size, num_chunks = len(held), max(map(len, held))
    places = {(stage // pp_size, rank): stage % pp_size for rank, stages in enumerate(held) for stage in stages}
    as_written = Placement("as written", lambda rank, chunk, pp_size: places.get((chunk, rank), rank))
    for placement in (loop, v_shape, as_written):
        if all(
            {info.index for info in placement.stages(rank, pp_size, num_chunks)} == stages
            and all(placement.rank(stage, pp_size) == rank for stage in stages)
            for rank, stages in enumerate(held)
        ):
            return placement, num_chunks
    raise ValueError(
        f"the stages {[sorted(stages) for stages in held]} of the ranks are no placement: a rank holds one stage of "
        f"each chunk, which has {pp_size} stages, and their ranks are a permutation that is its own inverse."
    )


def _events_around(action: Action) -> list[Event]:
    verb = next(verb for verb, kind in ACTION_KINDS.items() if kind == action.kind)
    verbs = [verb]
    if action.kind != "W":
        direction = "forward" if action.kind == "F" else "backward"
        verbs = [f"recv_{direction}", verb, f"send_{direction}"]
    return [Event(verb, action.stage, action.microbatch) for verb in verbs]
