"""A schedule written down: what every rank does, in which order, without a process group or a tensor."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from .kinds import KINDS, TORCHS_LETTERS, overlapped
from .placement import Placement, loop, v_shape
from .plan_facts import PlanFacts
from .recorder import Event
from .verbs import Action

if TYPE_CHECKING:
    from .memory import StageBytes
    from .simulation import PerStage, Simulation


class Plan(PlanFacts):
    """What every rank does in one step of a schedule."""

    def peak_in_flight(self, rank: int) -> int:
        """Most microbatches, or slices of them, that `rank` holds between their F and their B at once, each chunk
        counted by itself."""
        from .memory import peak_held

        return peak_held(self.actions[rank], "in_flight")

    @cached_property
    def posted_ahead(self) -> list[dict[Action, list[Action]]]:
        """Per rank and action, the later actions whose receives may be posted before it is launched, when its own
        messages have come: those of the next action or overlapped pair. Transports choose (`config.p2p_lookahead`).
        A host that waits for its device in the middle of any action does not make ranks wait for ever by it."""
        from .early_receives import posted_ahead

        return [
            {row[at]: [row[one] for one in others] for at, others in of_rank.items()}
            for row, of_rank in zip(self.actions, posted_ahead(self.program))
        ]

    def check(self) -> None:
        """Prove that the plan cannot hang, and that every message is received as the one that was sent.

        The rules are those of rendezvous transports: a send occupies its channel until it is received, and a channel
        carries its messages in order. A rank waits where a computation needs a message.

        Raises:
            ScheduleError: a rank waits for ever, and for what; or something is missing, there twice, or comes before
                what it needs on the same rank.
        """
        from .check import check_channels

        check_channels(self)

    def simulate(
        self,
        forward: PerStage = 1.0,
        backward_input: PerStage = 1.0,
        backward_weight: PerStage = 1.0,
        p2p: float = 0.0,
        *,
        message: float = 0.0,
        exchange: PerStage = 0.0,
        optimizer: float = 0.0,
        slices: Sequence[float] | None = None,
        microbatches: Sequence[float] | None = None,
        recompute: PerStage | None = None,
        memory: StageBytes | None = None,
        speeds: Sequence[float] | None = None,
        num_steps: int = 1,
        synchronize: bool = False,
    ) -> Simulation:
        """Play the plan through time.

        Args:
            forward, backward_input, backward_weight, p2p, message, exchange, optimizer, slices, microbatches,
            recompute,
                memory, speeds: see `Costs`.
            num_steps: consecutive steps, which overlap as they do without a barrier between them.
            synchronize: the optimizer waits for every rank's gradients, to clip them by their common norm.

        Raises:
            ValueError: a time is negative or not finite, a list of times has not one for each stage, slice or
                microbatch, or `num_steps` is less than 1.
            ScheduleError: a rank waits for ever.
        """
        from .simulation import Costs, simulate

        times = (forward, backward_input, backward_weight, p2p, message, optimizer, exchange, slices, microbatches)
        costs = Costs(*times, recompute=recompute, memory=memory, speeds=speeds)
        return simulate(self, costs, num_steps, synchronize)

    # Files

    def save_csv(self, path: str | Path) -> None:
        """Write one row per rank, one action or overlapped pair per cell, in the form that torch.distributed.pipelining
        reads: it calls a backward B only if that is a whole one, and the part for the input I."""
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(self.cells(TORCHS_LETTERS))

    def save_json(self, path: str | Path) -> None:
        """Write the name, the sizes, the name of the placement and the actions, for `load_plan`."""
        content = {"name": self.name, **self.sizes, "placement": self.placement.name}
        content["actions"] = self.cells()
        Path(path).write_text(json.dumps(content, indent=1) + "\n")

    def cells(self, kinds: Mapping[str, str] = MappingProxyType({})) -> list[list[str]]:
        """The actions and overlapped pairs of each rank in words, with other names for some kinds."""
        rows = [[str(a._replace(kind=kinds[a.kind]) if a.kind in kinds else a) for a in row] for row in self.actions]
        for row, pairs in zip(rows, self.program.pairs):
            for first, second in sorted(pairs.items(), reverse=True):
                row[first : second + 1] = [f"({row[first]};{row[second]})OVERLAP_F_B"]
        return rows


def plan_of(name: str, actions: Sequence[Sequence[Action]], pairs: Sequence[Sequence[int]] | None = None) -> Plan:
    """The plan in which each rank runs these actions. Each receives its message just before, and sends its result just
    after.

    Args:
        pairs: per rank, the places of the actions that are overlapped with the one after them.

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
        messages = [Event(f"{way}_{kind.direction}", *unit) for way in ("recv", "send") if kind.direction is not None]
        # Only sends come between the two halves of a pair.
        before = len(events) - 2 * is_second
        events[before:before] = messages[:1]
        events += [Event(verb, *unit), *messages[1:]]
    return events
