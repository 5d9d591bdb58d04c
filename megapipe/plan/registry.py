"""What a schedule is: a function that speaks the verbs, its placement, and how many chunks it runs."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from .placement import Placement, StageInfo
from .verbs import Verbs


class PlanSizes(NamedTuple):
    pp_size: int
    num_microbatches: int
    num_slices: int


@dataclass(eq=False)
class Schedule:
    """A schedule under its name.

    Attributes:
        loops: the hand-written function. Called with a `Pipeline` it trains, with a `PlanRecorder` it is recorded.
        name: what it is found by.
        placement: which rank holds which stage.
        num_chunks: stages per rank; None where the caller decides.
        max_pp_size: the largest pipeline it is meant for; None where any is.
        forward_only: it never goes backward.
        default_chunks: stages per rank where neither the schedule nor the caller decides.
        min_chunks: the fewest stages per rank where there are several ranks and the caller decides.
        slices: it can cut sequences into slices.
        sizes: those of the plan that it runs; None where it runs any.
    """

    name: str
    loops: Callable[[Verbs], Any]
    placement: Placement
    num_chunks: int | None = 1
    max_pp_size: int | None = None
    forward_only: bool = False
    default_chunks: int = 1
    min_chunks: int = 1
    slices: bool = False
    sizes: PlanSizes | None = None

    def __post_init__(self) -> None:
        self.default_chunks = self.num_chunks or self.default_chunks
        functools.update_wrapper(self, self.loops)  # type: ignore[arg-type]

    def check(self, pp_size: int, num_chunks: int | None) -> int:
        """The number of chunks per rank: `num_chunks`, or the schedule's own.

        Raises:
            ValueError: the schedule runs on fewer ranks, or on another number of chunks.
        """
        if self.max_pp_size is not None and pp_size > self.max_pp_size:
            raise ValueError(
                f"{self.name} runs on {self.max_pp_size} pipeline rank, got {pp_size}: choose another schedule, such "
                "as 1f1b, or pipeline_model_parallel_size=1."
            )
        if self.sizes is not None and pp_size != self.sizes.pp_size:
            raise ValueError(
                f"{self.name} is a plan for {self.sizes.pp_size} ranks, got {pp_size}: take a plan for these, or a "
                "schedule by its name."
            )
        if num_chunks is None:
            return self.default_chunks
        least = self.min_chunks if pp_size > 1 else 1
        if num_chunks < least or self.num_chunks not in (None, num_chunks):
            wanted = f"at least {least}" if self.num_chunks is None else f"{self.num_chunks}"
            other = "1f1b" if num_chunks == 1 else "interleaved_1f1b"
            choice = f", or choose a schedule that runs {num_chunks}, such as {other}" if num_chunks > 0 else ""
            raise ValueError(
                f"{self.name} runs {wanted} chunk(s) of the model on each rank, got {num_chunks}: give it {wanted}, "
                f"one for each stage that stages_for_rank lists{choice}."
            )
        return num_chunks

    def check_units(self, num_microbatches: int, num_slices: int) -> None:
        """Raises ValueError for other numbers than those of a plan, and where sequences are cut and the schedule cannot
        do it."""
        if num_slices < 1:
            raise ValueError(f"a sequence is at least 1 slice, got num_slices={num_slices}.")
        if self.sizes is not None:
            if self.sizes[1:] != (num_microbatches, num_slices):
                raise ValueError(
                    f"{self.name} is a plan of {self.sizes.num_microbatches} microbatches in {self.sizes.num_slices} "
                    f"slice(s), got {num_microbatches} in {num_slices}: take a plan for these, or a schedule's name."
                )
        elif num_slices > 1 and not self.slices:
            able = [name for name, schedule in _schedules.items() if schedule.slices]
            raise ValueError(
                f"{self.name} cannot cut sequences, got {num_slices} slices: choose {', '.join(able)}, or 1 slice."
            )

    def stages(self, pp_rank: int, pp_size: int, num_chunks: int | None = None) -> list[StageInfo]:
        """The stages of a rank, in the order of the `model` argument. Raises as `check` does."""
        return self.placement.stages(pp_rank, pp_size, self.check(pp_size, num_chunks))


ELSEWHERE = {
    "ScheduleGPipe": "gpipe",
    "Schedule1F1B": "1f1b",
    "ScheduleInterleaved1F1B": "interleaved_1f1b",
    "ScheduleLoopedBFS": "looped_bfs",
    "ScheduleInterleavedZeroBubble": "interleaved_zb1p",
    "ScheduleZBVZeroBubble": "zbv",
    "ScheduleDualPipeV": "dualpipev",
    "interleaved": "interleaved_1f1b",
    "zero_bubble": "zb1p",
    "combined": "combined_1f1b",
}
"""Names that others have for the same: torch.distributed.pipelining's classes, and what papers and Megatron say."""

OWN = "megapipe.schedules"
"""The module of megapipe's schedules."""

_schedules: dict[str, Schedule] = {}


def register(schedule: Schedule) -> None:
    """Make a schedule known by its name, in place of another one of the caller's that had it. Raises ValueError for the
    name of one of megapipe's."""
    known = _schedules.get(schedule.name)
    if known is not None and known.loops.__module__ == OWN != schedule.loops.__module__:
        raise ValueError(f"{schedule.name!r} is the name of a schedule of megapipe's: give yours another one.")
    _schedules[schedule.name] = schedule


def schedule_names() -> list[str]:
    """The names of all schedules, in the order in which they were registered."""
    return list(_schedules)


def schedule_named(name: str) -> Schedule:
    """Raises ValueError where there is no schedule of that name."""
    if name not in _schedules:
        elsewhere = {other: known for other, known in ELSEWHERE.items() if known in _schedules}
        meant = nearest(name, {known: known for known in _schedules} | elsewhere)
        guess = "" if meant is None else f" (do you mean {meant!r}?)"
        raise ValueError(f"there is no schedule {name!r}{guess}; choose one of {', '.join(_schedules)}.")
    return _schedules[name]


def nearest(name: str, meant: Mapping[str, str]) -> str | None:
    """What is meant by the known name that is nearest, but for signs and capitals; None where none is near."""
    by_letters = {_letters(known): meaning for known, meaning in meant.items()}
    near = difflib.get_close_matches(_letters(name), by_letters, n=1)
    return by_letters[near[0]] if near else None


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))
