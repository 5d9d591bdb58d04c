"""Every size of a schedule up to some, recorded and checked: what holds for all of them, and what for some."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import NamedTuple

from ..plan import AnySchedule, Plan, Schedule, ScheduleError, find_schedule, make_plan
from .places import error_in_words

LARGEST = 8
"""The most ranks that are tried, each with up to four times as many microbatches."""

PATIENCE = 10.0
"""Seconds until a schedule's function counts as one that does not return."""


class Size(NamedTuple):
    pp_size: int
    num_microbatches: int
    num_slices: int = 1

    def __str__(self) -> str:
        slices = f", {self.num_slices} slices" if self.num_slices > 1 else ""
        return f"p = {self.pp_size}, m = {self.num_microbatches}{slices}"


@dataclass
class Sizes:
    """What became of each size.

    Attributes:
        right: those that cannot hang, and whose messages arrive as they were sent.
        refused: those for which the schedule's function raises a ValueError of its own, and its text.
        wrong: the others, and what is wrong.
    """

    right: list[Size] = field(default_factory=list)
    refused: dict[Size, str] = field(default_factory=dict)
    wrong: dict[Size, str] = field(default_factory=dict)

    @property
    def first(self) -> Size | None:
        """The smallest that is wrong."""
        return min(self.wrong, key=lambda size: (size.num_slices, size.pp_size, size.num_microbatches), default=None)

    def __str__(self) -> str:
        total = len(self.right) + len(self.refused) + len(self.wrong)
        if self.first is not None:
            reason = f"the first is {self.first}: {self.wrong[self.first]}"
            return f"{len(self.wrong)} of {total} sizes are wrong{self._rule()}; {reason}"
        if not self.right:
            return f"it refuses all of {total} sizes, such as {_refusal(self.refused)}"
        text = f"{len(self.right)} sizes cannot hang: {_range(self.right)}"
        return text + (f"; {len(self.refused)} are refused, such as {_refusal(self.refused)}" if self.refused else "")

    def _rule(self) -> str:
        """What those that are right have in common, and those that are wrong have not."""
        for text, holds in RULES.items():
            if self.right and all(map(holds, self.right)) and not any(map(holds, self.wrong)):
                return f": it needs {text}"
        return "" if self.right else ": no size is right"


RULES: dict[str, Callable[[Size], bool]] = {
    "m >= p": lambda size: size.num_microbatches >= size.pp_size,
    "m > p": lambda size: size.num_microbatches > size.pp_size,
    "m >= p - 1": lambda size: size.num_microbatches >= size.pp_size - 1,
    "m >= 2 p": lambda size: size.num_microbatches >= 2 * size.pp_size,
    "m >= 2 p - 1": lambda size: size.num_microbatches >= 2 * size.pp_size - 1,
    "m a multiple of p": lambda size: size.num_microbatches % size.pp_size == 0,
    "an even m": lambda size: size.num_microbatches % 2 == 0,
    "an even p": lambda size: size.pp_size % 2 == 0,
    "an even p, or p = 1": lambda size: size.pp_size % 2 == 0 or size.pp_size == 1,
    "more than one microbatch": lambda size: size.num_microbatches > 1,
    "p = 1": lambda size: size.pp_size == 1,
    "at most 2 ranks": lambda size: size.pp_size <= 2,
    "one microbatch, or one rank": lambda size: size.num_microbatches == 1 or size.pp_size == 1,
    "m <= p": lambda size: size.num_microbatches <= size.pp_size,
    "whole sequences": lambda size: size.num_slices == 1,
}


def _range(sizes: list[Size]) -> str:
    ranks, slices = {size.pp_size for size in sizes}, {size.num_slices for size in sizes}
    text = f"p up to {max(ranks)}, m up to {max(size.num_microbatches for size in sizes)}"
    return text + (f", 1 to {max(slices)} slices" if len(slices) > 1 else "")


def _refusal(refused: dict[Size, str]) -> str:
    size = min(refused)
    return f"{size} ({refused[size]})"


def check_sizes(name: AnySchedule, num_chunks: int | None = None) -> Sizes:
    """Record and check a schedule on up to 8 ranks with up to 4 microbatches a rank, and a plan at its own size."""
    schedule, found = find_schedule(name), Sizes()
    for size in _sizes_of(schedule):
        try:
            with _within(PATIENCE):
                plan_of_size(schedule, size, num_chunks).check()
            found.right.append(size)
        except ScheduleError as error:
            found.wrong[size] = str(error)
        except ValueError as error:
            found.refused[size] = str(error)
        except Exception as error:
            found.wrong[size] = error_in_words(error)
            if isinstance(error, TimeoutError):  # which all others would take as long for
                break
    return found


def plan_of_size(schedule: Schedule, size: Size, num_chunks: int | None = None) -> Plan:
    chunks = num_chunks if schedule.num_chunks is None else None
    return make_plan(schedule, size.pp_size, size.num_microbatches, chunks, num_slices=size.num_slices)


def _sizes_of(schedule: Schedule) -> Iterator[Size]:
    if schedule.sizes is not None:
        yield Size(*schedule.sizes)
        return
    for pp_size in range(1, min(LARGEST, schedule.max_pp_size or LARGEST) + 1):
        for num_microbatches in range(1, 4 * pp_size + 1):
            for num_slices in (1, 2, 3) if schedule.slices and pp_size <= LARGEST // 2 else (1,):
                yield Size(pp_size, num_microbatches, num_slices)


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, where this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"the schedule's function has not returned after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
