"""The cache of plans: each is recorded once for its `PlanKey`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from ..plan import Action, ChannelName, Plan, Schedule, Settings, Verbs, loops_of, make_plan, record


class PlanKey(NamedTuple):
    """Everything a training step's plan depends on. The fields are `make_plan`'s arguments."""

    schedule: Schedule
    pp_size: int
    num_microbatches: int
    num_chunks: int
    settings: Settings
    num_slices: int = 1

    @property
    def plan(self) -> Plan:
        """The plan, recorded at the first use.

        Raises:
            ValueError: the schedule cannot keep to the settings, or there are no such stages or slices.
        """
        return _record(self)

    @property
    def loops(self) -> Callable[[Verbs], Any]:
        """The function that a training step runs: the schedule's own, or one that follows the plan if O and L were
        added."""
        return self.schedule.loops if self.settings.offload is None else loops_of(self.plan)

    def traffic_around(self, pp_rank: int) -> dict[tuple[int, int], list[ChannelName]]:
        """`Plan.traffic` from and to a rank. Only the calls of this rank and its neighbours are recorded, unless copies
        to host memory need a place in the plan."""
        if self.settings.offload is not None:
            return self.plan.traffic
        placement = self.schedule.placement
        sizes = (self.pp_size, self.num_microbatches, self.num_chunks, self.schedule.forward_only)
        ranks = {pp_rank}
        for info in placement.stages(pp_rank, self.pp_size, self.num_chunks):
            around = {info.index - 1, info.index + 1} & {*range(info.num_stages)}
            ranks |= {placement.rank(index, self.pp_size) for index in around}
        events = record(self.schedule.loops, placement, *sizes, self.settings, self.num_slices, ranks=ranks)
        return Plan(self.schedule.name, placement, *sizes, events, self.num_slices).traffic

    def recomputed(self, pp_rank: int) -> frozenset[Action]:
        """The Fs of a rank whose activations are recomputed: by the settings, or by the plan if a plan is run."""
        says = self.settings.recomputes or self.schedule.sizes is not None
        return self.plan.recomputed[pp_rank] if says else frozenset()

    @property
    def kinds(self) -> set[str]:
        """The kinds of action in the plan, if a plan is run; empty for other schedules."""
        is_plan = self.schedule.sizes is not None
        return {action.kind for row in self.plan.actions for action in row} if is_plan else set()


@functools.lru_cache(maxsize=16)
def _record(key: PlanKey) -> Plan:
    sizes = (key.pp_size, key.num_microbatches, key.num_chunks)
    return make_plan(key.schedule, *sizes, num_slices=key.num_slices, settings=key.settings)
