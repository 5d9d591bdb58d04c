"""The data of a plan, and what is derived from it for checks, simulations and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from .kinds import FORWARD, OFFLOAD, RECOMPUTE, WEIGHTS, Kind, kind_of
from .placement import Placement
from .program import Program, compile_events
from .recorder import ChannelName, Event
from .verbs import Action


@dataclass(frozen=True)
class PlanFacts:
    """What every rank does in one step of a schedule."""

    name: str
    placement: Placement
    pp_size: int
    num_microbatches: int
    num_chunks: int
    forward_only: bool
    events: Sequence[Sequence[Event]]
    """Per rank, every call of a verb."""
    num_slices: int = 1

    @cached_property
    def actions(self) -> list[list[Action]]:
        """The computations of each rank, in order. Each prints like `2F0`."""
        return [[action for event in row if (action := event.action) is not None] for row in self.events]

    @property
    def sizes(self) -> dict[str, int]:
        names = ("pp_size", "num_microbatches", "num_chunks", "num_slices")
        return {name: getattr(self, name) for name in names}

    @property
    def num_messages(self) -> int:
        """How many messages travel between ranks in one step."""
        return sum(event.sends for rank in range(self.pp_size) for event in self.messages(rank))

    def messages(self, rank: int) -> list[Event]:
        """The sends and receives of a rank that go to, or come from, another one."""
        return [event for event in self.events[rank] if self.peer(rank, event) is not None]

    @cached_property
    def traffic(self) -> dict[tuple[int, int], list[ChannelName]]:
        """The channels of the messages that travel in one step, by sender and receiver, in the order in which they are
        sent."""
        traffic: dict[tuple[int, int], list[ChannelName]] = {}
        for rank in range(self.pp_size):
            for event in self.events[rank]:
                if event.sends and (peer := self.peer(rank, event)) is not None:
                    traffic.setdefault((rank, peer), []).append(event.channel)
        return traffic

    def peer(self, rank: int, event: Event) -> int | None:
        """The other rank that an event of `rank` sends to or receives from; None where there is none."""
        if kind_of(event.verb) is not None:
            return None
        stage = event.stage + (1 if event.sends == event.is_forward else -1)
        if not self.has_stage(stage):
            return None
        peer = self.rank_of(stage)
        return None if peer == rank else peer

    def rank_of(self, stage: int) -> int:
        return self.placement.rank(stage, self.pp_size)

    def chunk_of(self, stage: int) -> int:
        return stage // self.pp_size

    def has_stage(self, stage: int) -> bool:
        return 0 <= stage < self.pp_size * self.num_chunks

    def needs(self, event: Event) -> Event | None:
        """The send of the message that a computation waits for; None if it waits for none."""
        computed = kind_of(event.verb)
        if computed is None or computed.direction is None:
            return None
        kind, boundary = event.channel
        if not 0 <= boundary < self.pp_size * self.num_chunks - 1:
            return None
        return Event(f"send_{kind}", boundary + (kind == "backward"), event.microbatch, event.slice)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backwards: it has Ws."""
        return any(action.kind == WEIGHTS.name for row in self.actions for action in row)

    def number_in_backwards(self, event: Event) -> int:
        """The place of an event's unit in the order of its stage's backwards. Microbatches may be numbered
        otherwise."""
        return self._units_of[event.stage].index((event.microbatch, -event.slice))

    @cached_property
    def _units_of(self) -> dict[int, list[tuple[int, int]]]:
        """The units of each stage in the order of its backwards, slices with their numbers negative."""
        units: dict[int, set[tuple[int, int]]] = {}
        for action in (action for row in self.actions for action in row):
            units.setdefault(action.stage, set()).add((action.microbatch, -action.slice))
        return {stage: sorted(of_stage) for stage, of_stage in units.items()}

    @cached_property
    def offloaded(self) -> list[frozenset[Action]]:
        """Per rank, the Fs whose activations go to host memory (O)."""
        return self._forwards_with(OFFLOAD)

    @cached_property
    def recomputed(self) -> list[frozenset[Action]]:
        """Per rank, the Fs whose activations are recomputed (R)."""
        return self._forwards_with(RECOMPUTE)

    def _forwards_with(self, kind: Kind) -> list[frozenset[Action]]:
        """Per rank, the Fs of the units that have an action of this kind."""
        return [frozenset(a._replace(kind=FORWARD.name) for a in row if a.kind == kind.name) for row in self.actions]

    @cached_property
    def program(self) -> Program:
        """The plan compiled to arrays of numbers, for simulation."""
        return compile_events(self.events, list(map(self.rank_of, range(self.pp_size * self.num_chunks))), self.needs)
