"""Plans that run: a plan, or a file of one, is a schedule whose loops make the calls that are written down."""

from __future__ import annotations

import functools
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from .files import load_plan
from .kinds import KINDS, is_overlapped, kind_of
from .plan import Plan
from .recorder import record
from .registry import PlanSizes, Schedule
from .verbs import Verbs


def schedule_of_file(path: Path) -> Schedule:
    """The schedule that runs the plan in a file. Raises as `find_schedule` does."""
    try:
        return _read(path.absolute(), path.stat().st_mtime_ns)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}: give that of a plan, or the name of a schedule.") from None


@functools.lru_cache(maxsize=16)
def _read(path: Path, changed_at: int) -> Schedule:
    """Once: trainers look their schedule up in every step."""
    return schedule_of(load_plan(path))


def schedule_of(plan: Plan) -> Schedule:
    """The schedule that runs a plan."""
    loops = loops_of(plan)
    num_forwards = Counter(action.stage for row in plan.actions for action in row if KINDS[action.kind].is_forward)
    num_microbatches = max(num_forwards.values(), default=0) // plan.num_slices
    sizes = (plan.pp_size, num_microbatches, plan.num_chunks, plan.forward_only)
    events = record(loops, plan.placement, *sizes, None, plan.num_slices)
    plan = replace(plan, num_microbatches=num_microbatches, events=events)
    name = f"{plan.name} [{zlib.crc32(repr(list(map(list, plan.events))).encode()):08x}]"
    if name not in _made:
        plan.check()
        only = PlanSizes(plan.pp_size, plan.num_microbatches, plan.num_slices)
        _made[name] = Schedule(name, loops, plan.placement, plan.num_chunks, forward_only=plan.forward_only, sizes=only)
    return _made[name]


_made: dict[str, Schedule] = {}
"""Schedules by name: a plan that is given again is the same one, for which everything has been found out already."""


def loops_of(plan: Plan) -> Callable[[Verbs], Any]:
    """The loops of a schedule that makes a plan's calls."""
    return functools.partial(_play, plan)


def _play(plan: Plan, pipe: Verbs) -> Any:
    """The loops of a plan: its calls, one by one. A pair is one call, made before the send that a plan has between its
    halves."""
    begun: list[tuple[str, int]] = []  # the first of a pair
    sends: list[tuple[str, int]] = []  # what it has made
    for event in plan.events[pipe.pp_rank]:
        kind, chunk = kind_of(event.verb), plan.chunk_of(event.stage)
        if kind is None and begun:
            sends.append((event.verb, chunk))
        elif kind is None:
            getattr(pipe, event.verb)(chunk)
        elif not is_overlapped(event.verb):
            pipe.run(kind.name, chunk, plan.number_in_backwards(event) if kind.is_optional else None)
        elif not begun:
            begun.append((kind.name, chunk))
        else:
            pipe.run_pair(begun.pop(), (kind.name, chunk))
            while sends:
                verb, chunk = sends.pop(0)
                getattr(pipe, verb)(chunk)
    return pipe.finish()
