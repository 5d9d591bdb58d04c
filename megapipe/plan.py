"""A schedule written down: what every rank does, in which order, without a process group or a tensor.

The plan comes from running the schedule function itself on a `PlanRecorder`, once per rank, so it cannot differ from
what a `Pipeline` does. Played through time, it tells whether the schedule can hang, how long a step takes, how much of
it is bubble, and how many microbatches are in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .placement import Placement
from .registry import Schedule, find_schedule
from .verbs import Action, ScheduleError, Verbs

__all__ = ["Event", "Plan", "PlanRecorder", "Simulation", "Span", "make_plan"]


class Event(NamedTuple):
    """One call of a verb."""

    verb: str
    stage: int
    microbatch: int


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
        microbatch_group_size: int | None = None,
    ) -> None:
        super().__init__(placement, pp_rank, pp_size, num_microbatches, num_chunks, forward_only, microbatch_group_size)
        self.events: list[Event] = []

    def recv_forward(self, chunk: int = 0) -> None:
        self._record("recv_forward", chunk)

    def forward_step(self, chunk: int = 0) -> None:
        self._record("forward_step", chunk)

    def send_forward(self, chunk: int = 0) -> None:
        self._record("send_forward", chunk)

    def recv_backward(self, chunk: int = 0) -> None:
        self._record("recv_backward", chunk)

    def backward_step(self, chunk: int = 0) -> None:
        self._record("backward_step", chunk)

    def send_backward(self, chunk: int = 0) -> None:
        self._record("send_backward", chunk)

    def finish(self) -> None:
        self._check_finished()

    def _record(self, verb: str, chunk: int) -> None:
        if not (self.forward_only and "backward" in verb):
            microbatch = self._advance(verb, chunk)
            self.events.append(Event(verb, self.stages[chunk].index, microbatch))


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """A plan played through time. Lists have one entry per rank."""

    spans: list[list[Span]]
    makespan: float
    """From the start of the first action to the end of the last."""
    bubble: list[float]
    """Share of the makespan in which the rank computes nothing."""
    peak_activations: list[float]
    """Most microbatches in flight at once, in microbatches of the whole rank: a chunk counts as its share of it."""


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step of a schedule."""

    schedule: Schedule
    pp_size: int
    num_microbatches: int
    num_chunks: int
    events: list[list[Event]]
    """Per rank, every call of a verb."""

    @cached_property
    def actions(self) -> list[list[Action]]:
        """Per rank, the computations in order; each prints like `2F0`."""
        return [[_ACTION[e.verb](e) for e in events if e.verb in _ACTION] for events in self.events]

    def peak_in_flight(self, rank: int) -> int:
        """Most microbatches that `rank` holds between their F and their B at once, each chunk counted by itself."""
        in_flight = peak = 0
        for action in self.actions[rank]:
            in_flight += 1 if action.kind == "F" else -1
            peak = max(peak, in_flight)
        return peak

    def check(self) -> None:
        """Prove that the plan cannot hang: that no rank waits for data that never comes.

        The rules are those of rendezvous transports: a send waits on its channel until it is received, and a channel
        carries its messages in order. Raises ScheduleError with the wait that would last for ever.
        """
        self._play(lambda action: 1.0, 0.0)

    def simulate(
        self, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0, p2p: float = 0.0
    ) -> Simulation:
        """Play the plan with these times for a microbatch on a whole rank, shared out evenly over its chunks.

        Args:
            p2p: time from the end of an action until its result can be used on another rank.
        """
        times = {"F": forward, "BW": backward_input + backward_weight}
        spans = self._play(lambda action: times[action.kind] / self.num_chunks, p2p)
        makespan = max(rank[-1].end for rank in spans) - min(rank[0].start for rank in spans)
        busy = [sum(span.end - span.start for span in rank) for rank in spans]
        return Simulation(
            spans=spans,
            makespan=makespan,
            bubble=[1 - time / makespan for time in busy],
            peak_activations=[self.peak_in_flight(rank) / self.num_chunks for rank in range(self.pp_size)],
        )

    def _play(self, duration: Callable[[Action], float], p2p: float) -> list[list[Span]]:
        """Run all ranks side by side. A rank waits where an action needs a message that has not arrived."""
        spans: list[list[Span]] = [[] for _ in self.events]
        arrivals: dict[Event, float] = {}  # by the event that sends
        waiting: dict[Event, int] = {}  # the rank that waits for what this event sends
        position = [0] * self.pp_size
        clock = [0.0] * self.pp_size
        runnable = list(range(self.pp_size))
        while runnable:
            rank = runnable.pop()
            events = self.events[rank]
            while position[rank] < len(events):
                event = events[position[rank]]
                needed = self._needed(event)
                if needed is not None:
                    if needed not in arrivals:
                        waiting[needed] = rank
                        break
                    clock[rank] = max(clock[rank], arrivals[needed])
                if event.verb in _ACTION:
                    action = _ACTION[event.verb](event)
                    end = clock[rank] + duration(action)
                    spans[rank].append(Span(action, clock[rank], end))
                    clock[rank] = end
                elif event.verb.startswith("send"):
                    crosses = self._receiver(event) != rank
                    arrivals[event] = clock[rank] + (p2p if crosses else 0.0)
                    if event in waiting:
                        runnable.append(waiting.pop(event))
                position[rank] += 1
        self._check_ended(position)
        return spans

    def _needed(self, event: Event) -> Event | None:
        """The event that sends what this one waits for."""
        if event.verb == "forward_step" and event.stage > 0:
            return Event("send_forward", event.stage - 1, event.microbatch)
        if event.verb == "backward_step" and event.stage < self.pp_size * self.num_chunks - 1:
            return Event("send_backward", event.stage + 1, event.microbatch)
        return None

    def _receiver(self, send: Event) -> int:
        return self._rank_of(send.stage + (1 if send.verb == "send_forward" else -1))

    def _rank_of(self, stage: int) -> int:
        return self.schedule.placement.rank(stage, self.pp_size)

    def _check_ended(self, position: list[int]) -> None:
        stuck = [rank for rank, events in enumerate(self.events) if position[rank] < len(events)]
        if stuck:
            lines = []
            for rank in stuck:
                event = self.events[rank][position[rank]]
                needed = self._needed(event)
                assert needed is not None
                peer = self._rank_of(needed.stage)
                what = "forward input" if event.verb == "forward_step" else "output gradient"
                place = f"waits at {self._at(peer, position)}" if peer in stuck else "has ended its step"
                lines.append(
                    f"rank {rank} waits at {_ACTION[event.verb](event)} for the {what} of microbatch "
                    f"{event.microbatch} from rank {peer}, which {place}"
                )
            raise ScheduleError(f"{self.schedule.name} would hang: {'; '.join(lines)}.")

    def _at(self, rank: int, position: list[int]) -> Action:
        event = self.events[rank][position[rank]]
        return _ACTION[event.verb](event)


def make_plan(
    schedule: str | Schedule,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    forward_only: bool = False,
    microbatch_group_size: int | None = None,
) -> Plan:
    """Record `schedule` for every rank of a pipeline.

    Args:
        schedule: a name, or a function decorated with `@schedule`.
        num_chunks: stages per rank; None takes the schedule's own.
        microbatch_group_size: `config.microbatch_group_size_per_vp_stage`.

    Raises ValueError on an unknown name or impossible sizes, ScheduleError where the schedule is wrong in itself.
    """
    found = find_schedule(schedule)
    num_chunks = found.check(pp_size, num_chunks)
    if pp_size < 1 or num_microbatches < 1:
        raise ValueError(f"a plan needs at least 1 rank and 1 microbatch, got {pp_size} and {num_microbatches}.")
    forward_only = forward_only or found.forward_only
    events = []
    for rank in range(pp_size):
        recorder = PlanRecorder(
            found.placement, rank, pp_size, num_microbatches, num_chunks, forward_only, microbatch_group_size
        )
        found.loops(recorder)
        events.append(recorder.events)
    return Plan(found, pp_size, num_microbatches, num_chunks, events)


_ACTION: Mapping[str, Callable[[Event], Action]] = {
    "forward_step": lambda event: Action(event.stage, "F", event.microbatch),
    "backward_step": lambda event: Action(event.stage, "BW", event.microbatch),
}
