"""A schedule written down: what every rank does, in which order, without a process group or a tensor.

The plan comes from running the schedule function itself on a `PlanRecorder`, once per rank, so it cannot differ from
what a `Pipeline` does.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np

from .check import check_channels
from .kinds import KINDS, kind_of, overlapped
from .occupancy import check_occupancy, peak_waiting
from .placement import Placement, loop, v_shape
from .program import Program, compile_plan
from .recorder import ChannelName, Event
from .rows import Row, column
from .shared_communicator import check_shared_communicator
from .simulation import Costs, PerStage, Simulation, peak_held, simulate
from .verbs import Action

__all__ = ["Plan", "plan_of"]


@dataclass(frozen=True)
class Plan:
    """What every rank does in one step of a schedule."""

    name: str
    placement: Placement
    pp_size: int
    num_microbatches: int
    num_chunks: int
    forward_only: bool
    events: Sequence[Sequence[Event]]
    """Per rank, every call of a verb: a `Row` where they were recorded, in an order that the recorder found right."""
    num_slices: int = 1

    @property
    def is_recorded(self) -> bool:
        """Each rank does what a recorder found right: everything once, each step after the one before it."""
        return all(isinstance(row, Row) for row in self.events)

    @cached_property
    def rows(self) -> list[Row[Event]]:
        """The events, as rows."""
        return [row if isinstance(row, Row) else Row.of(row, self.num_slices) for row in self.events]

    @cached_property
    def actions(self) -> list[Row[Action]]:
        """Per rank, the computations in order; each prints like `2F0`."""
        return list(map(_computations, self.rows))

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
        """By sender and receiver, the channels of the messages that travel between them in one step, in the order in
        which they are sent."""
        traffic: dict[tuple[int, int], list[ChannelName]] = {}
        for rank in range(self.pp_size):
            for event in self.messages(rank):
                peer = self.peer(rank, event)
                if event.sends and peer is not None:
                    traffic.setdefault((rank, peer), []).append(event.channel)
        return traffic

    def peer(self, rank: int, event: Event) -> int | None:
        """The other rank that an event of `rank` sends to or receives from; None where there is none."""
        stage = event.stage + (1 if event.sends == event.is_forward else -1)
        if event.action is not None or not self.has_stage(stage):
            return None
        peer = self.rank_of(stage)
        return None if peer == rank else peer

    def peak_in_flight(self, rank: int) -> int:
        """Most microbatches, or slices of them, that `rank` holds between their F and their B at once, each chunk
        counted by itself."""
        return peak_held(self.actions[rank], "in_flight")

    def peak_waiting(self, rank: int) -> int:
        """Most messages that occupy the device of `rank` at a time while they wait, as kernels of NCCL do: the receives
        that one step waits for, and a send to each neighbour, where that is larger than NCCL's buffers."""
        return peak_waiting(self, rank)

    def rank_of(self, stage: int) -> int:
        return self.placement.rank(stage, self.pp_size)

    def chunk_of(self, stage: int) -> int:
        return stage // self.pp_size

    def has_stage(self, stage: int) -> bool:
        return 0 <= stage < self.pp_size * self.num_chunks

    def needs(self, event: Event) -> Event | None:
        """The send that a computation waits for, if any."""
        computed = kind_of(event.verb)
        if computed is None or computed.message is None:
            return None
        kind, boundary = event.channel
        if not 0 <= boundary < self.pp_size * self.num_chunks - 1:
            return None
        return Event(f"send_{kind}", boundary + (kind == "backward"), event.microbatch, event.slice)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the schedule runs weight-gradient passes (W) by themselves."""
        return any(KINDS[action.kind].after for action in self.actions[0])

    @cached_property
    def program(self) -> Program:
        """The plan compiled for the player."""
        return compile_plan(self)

    def check(self, *, shared_communicator: bool = False, max_waiting: int | None = None) -> None:
        """Prove that the plan cannot hang, and that every message is received as the one that was sent.

        The rules are those of rendezvous transports: a send occupies its channel until it is received, and a channel
        carries its messages in order. A rank waits where a computation needs a message.

        Args:
            shared_communicator: instead of one channel per boundary and direction, all messages of a rank share one
                communicator, which runs them one at a time in the order of the calls and pairs them by rank alone.
                Most schedules hang or mix messages up there: it is why channels exist.
            max_waiting: also prove that no more messages than this occupy a device while they wait (`peak_waiting`).
                Over NCCL each takes up to 4 multiprocessors from what is computed beside it.

        Raises:
            ScheduleError: a rank waits for ever, and for what; or something is missing, there twice, or comes before
                what it needs on the same rank; or more messages than `max_waiting` may wait on a device.
        """
        (check_shared_communicator if shared_communicator else check_channels)(self)
        if max_waiting is not None:
            check_occupancy(self, max_waiting)

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
        slices: Sequence[float] | None = None,
        num_steps: int = 1,
        synchronize: bool = False,
    ) -> Simulation:
        """Play the plan through time.

        Args:
            forward, backward_input, backward_weight, p2p, message, overlap, optimizer, slices: see `Costs`.
            num_steps: consecutive steps, which overlap as they do without a barrier between them.
            synchronize: the optimizer waits for every rank's gradients, to clip them by their common norm.

        Raises:
            ValueError: a time is negative or not finite, a list of times has not one for each stage or slice, or
                `num_steps` is less than 1.
            ScheduleError: a rank waits for ever.
        """
        costs = Costs(forward, backward_input, backward_weight, p2p, message, optimizer, overlap, slices)
        return simulate(self, costs, num_steps, synchronize)

    # Files

    def save_csv(self, path: str | Path) -> None:
        """Write one row per rank, one action or overlapped pair per cell, in the form that torch.distributed.pipelining
        reads: it calls a backward B only if that is a whole one, and the part for the input I."""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(self.cells({"B": "I"}))

    def save_json(self, path: str | Path) -> None:
        """Write the name, the sizes, the name of the placement and the actions, for `load_plan`."""
        content = {"name": self.name, **self.sizes, "placement": self.placement.name}
        content["actions"] = self.cells()
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    def cells(self, kinds: Mapping[str, str] = MappingProxyType({})) -> list[list[str]]:
        """By rank, its actions and overlapped pairs in words, with other names for some kinds."""
        rows = [[str(a._replace(kind=kinds.get(a.kind, a.kind))) for a in actions] for actions in self.actions]
        for row, pairs in zip(rows, self.program.pairs):
            for first, second in sorted(pairs.items(), reverse=True):
                row[first : second + 1] = [f"({row[first]};{row[second]})OVERLAP_F_B"]
        return rows


def _computations(row: Row[Event]) -> Row[Action]:
    kinds = [kind_of(verb) for verb, _ in row.words]
    words = [(stage, "" if kind is None else kind.name) for kind, (_, stage) in zip(kinds, row.words)]
    computes = row.look_up([kind is not None for kind in kinds], bool)
    codes, units = (column(values.typecode, np.asarray(values)[computes]) for values in (row.codes, row.units))
    return Row(Action, words, codes, units, row.num_slices)


def plan_of(name: str, actions: Sequence[Sequence[Action]], pairs: Sequence[Sequence[int]] | None = None) -> Plan:
    """The plan in which each rank runs these actions. Each receives its message just before, and sends its result just
    after.

    Args:
        pairs: per rank, the places of the actions that are overlapped with the one behind them.

    Raises:
        ValueError: the stages of the ranks are no placement.
    """
    placement, num_chunks = _find_placement(actions)
    kinds = {action.kind for row in actions for action in row}
    return Plan(
        name,
        placement,
        len(actions),
        1 + max(action.microbatch for row in actions for action in row),
        num_chunks,
        all(KINDS[kind].is_forward for kind in kinds),
        list(map(_events_of, actions, pairs or [()] * len(actions))),
        1 + max(action.slice for row in actions for action in row),
    )


def _find_placement(actions: Sequence[Sequence[Action]]) -> tuple[Placement, int]:
    held = [{action.stage for action in row} for row in actions]
    pp_size, num_chunks = len(held), max(map(len, held))
    places = {(stage // pp_size, rank): stage % pp_size for rank, stages in enumerate(held) for stage in stages}
    ranks = {(chunk, place): rank for (chunk, rank), place in places.items()}
    as_written = Placement(
        "as written",
        lambda rank, chunk, pp_size: places.get((chunk, rank), rank),
        lambda place, chunk, pp_size: ranks.get((chunk, place), place),
    )
    for placement in (loop, v_shape, as_written):
        if all(
            {info.index for info in placement.stages(rank, pp_size, num_chunks)} == stages
            and all(placement.rank(stage, pp_size) == rank for stage in stages)
            for rank, stages in enumerate(held)
        ):
            return placement, num_chunks
    raise ValueError(
        f"the stages {[sorted(stages) for stages in held]} of the ranks are no placement: a rank holds one stage of "
        f"each chunk, which has {pp_size} stages."
    )


def _events_of(row: Sequence[Action], pairs: Sequence[int]) -> list[Event]:
    events: list[Event] = []
    for at, action in enumerate(row):
        unit, kind = (action.stage, action.microbatch, action.slice), KINDS[action.kind]
        is_second = at - 1 in pairs
        verb = overlapped(kind) if is_second or at in pairs else kind.verb
        messages = [Event(f"{way}_{kind.message}", *unit) for way in ("recv", "send") if kind.message is not None]
        # Only sends come between the two halves of a pair.
        before = len(events) - 2 * is_second
        events[before:before] = messages[:1]
        events += [Event(verb, *unit), *messages[1:]]
    return events
