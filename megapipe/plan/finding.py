"""A schedule by its name, or one that runs a plan."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from .registry import Schedule, schedule_named

if TYPE_CHECKING:
    from .plan import Plan

AnySchedule: TypeAlias = "str | os.PathLike[str] | Plan | Schedule"
"""A schedule, its name, a plan, or the path to a file of a plan."""


def find_schedule(name: AnySchedule) -> Schedule:
    """The schedule of that name, or the one that runs a plan.

    The latter makes the calls that the plan has for each rank, and has the sizes of the plan only. Each chunk takes its
    microbatches in order: the n-th forward of a stage is that of microbatch n, and so are its n-th B and W, whatever
    their numbers in the plan. The name ends with a number made from all calls, so that ranks which are given different
    plans do not agree on it. A step with `forward_only` leaves the backwards out.

    Args:
        name: of a schedule; or a plan, or a path to a file of one (.json, .csv, .txt), which `load_plan` reads. A
            schedule is returned as it is.

    Raises:
        TypeError: it is none of these.
        ValueError: there is no schedule of that name, or the file does not hold a plan.
        ScheduleError: the plan cannot run, as `Plan.check` finds.
    """
    if isinstance(name, Schedule):
        return name
    if not isinstance(name, (str, os.PathLike)):
        from .plan import Plan  # which schedules by name do without
        from .planned import schedule_of

        if not isinstance(name, Plan):
            raise TypeError(f"a schedule is given by its name, as a plan, or by the path of one's file, got {name!r}.")
        return schedule_of(name)
    path = Path(name)
    if path.suffix not in (".json", ".csv", ".txt"):
        return schedule_named(str(name))
    from .planned import schedule_of_file

    return schedule_of_file(path)
