"""Plans made by recording: the schedule function itself runs on a `PlanRecorder`, once per rank.

So a plan cannot differ from what a `Pipeline` does.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from .finding import AnySchedule, find_schedule
from .placement import Placement
from .plan import Plan
from .recorder import record
from .verbs import Settings

if TYPE_CHECKING:
    from .simulation import Costs


def make_plan(
    schedule: AnySchedule,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    *,
    num_slices: int = 1,
    forward_only: bool = False,
    settings: Settings | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Record `schedule` for every rank of a pipeline.

    Args:
        schedule: as `find_schedule` takes it: a name, or a function decorated with `@schedule`.
        pp_size: ranks of the pipeline.
        num_microbatches: microbatches per step.
        num_chunks: stages per rank; None takes the schedule's own.
        num_slices: slices that each sequence is cut into.
        forward_only: record a step without backwards.
        settings: other settings of the schedule.
        costs: the times by which `settings.offload` finds places for copies. None where F, B and W take equally long.

    Raises:
        ValueError: there is no schedule of that name, the sizes are impossible, or the settings cannot be kept.
        TypeError: a size is no whole number.
        ScheduleError: the schedule is wrong in itself.
    """
    found = find_schedule(schedule)
    pp_size, num_microbatches = _whole("pp_size", pp_size), _whole("num_microbatches", num_microbatches)
    num_chunks = found.check(pp_size, None if num_chunks is None else _whole("num_chunks", num_chunks))
    num_slices = _whole("num_slices", num_slices)
    found.check_units(num_microbatches, num_slices)
    if pp_size < 1 or num_microbatches < 1:
        raise ValueError(f"a plan needs at least 1 rank and 1 microbatch, got {pp_size} and {num_microbatches}.")
    _check_placement(found.placement, pp_size, num_chunks)
    recompute = () if settings is None else settings.recompute
    if isinstance(recompute, tuple) and len(recompute) not in (0, pp_size * num_chunks):
        raise ValueError(
            f"recompute must say for each of the {pp_size * num_chunks} stages whether it is computed again, got "
            f"{len(recompute)} values: {pp_size} ranks have {num_chunks} chunks each."
        )
    forward_only = forward_only or found.forward_only
    sizes = (pp_size, num_microbatches, num_chunks, forward_only)
    events = record(found.loops, found.placement, *sizes, settings, num_slices)
    plan = Plan(found.name, found.placement, *sizes, events, num_slices)
    if settings is not None and settings.offload is not None and not forward_only:
        from .offloading import offload_activations
        from .simulation import Costs

        plan = offload_activations(plan, costs or Costs(), settings.offload)
    if settings is not None and settings.max_in_flight is not None:
        from .memory import peak_activations

        in_flight = max(peak_activations(plan))
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
                    f"is on rank {rank} by its position, but on rank {found} by the inverse. Give Placement an inverse."
                )
