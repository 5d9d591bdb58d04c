"""Long timelines, folded: of a steady phase one period is kept, so that a picture stays readable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..plan import Plan, Span

__all__ = ["Cut", "find_cut"]


class Cut(NamedTuple):
    """A stretch of time that is left out."""

    start: float
    length: float
    repeats: int
    """How often the period before the cut comes, with those that are left out; 0 where what is left out has none."""

    @property
    def period(self) -> float:
        return self.length / max(1, self.repeats - 1)

    def place(self, time: float) -> float:
        """The place of a time in the picture."""
        return min(time, max(self.start, time - self.length))

    def time_at(self, place: float) -> float:
        """The time at a place in the picture."""
        return place if place < self.start else place + self.length


def find_cut(plan: Plan, ranks: Sequence[Sequence[Span]], longest: float) -> Cut | None:
    """The stretch to leave out of a simulated plan that takes more than `longest`, so that little more remains.

    That is all but two periods of the steady phase, whose actions come again at the same intervals on all ranks. Where
    there is no such phase it is the middle.
    """
    begin, end = min(spans[0].start for spans in ranks), max(spans[-1].end for spans in ranks)
    excess = end - begin - longest
    if excess <= 0:
        return None
    if (steady := _find_steady(plan, ranks)) is not None:
        first, last, period = steady
        left_out = math.floor((last - first) / period) - 2
        if end - begin - left_out * period <= 1.5 * longest:
            return Cut(first + period, left_out * period, left_out + 1)
    return Cut(begin + longest / 2, excess, 0)


def _find_steady(plan: Plan, ranks: Sequence[Sequence[Span]]) -> tuple[float, float, float] | None:
    """Begin, end and period of the phase in which every rank repeats itself; of the shortest period."""
    for num_microbatches in range(1, min(2 * plan.pp_size, plan.num_microbatches // 3) + 1):
        phases = []
        period = 0.0
        for spans, actions in zip(ranks, plan.actions):
            stride = len(actions) * num_microbatches // plan.num_microbatches
            if not period:  # that of the first rank
                middle = (len(spans) - stride) // 2
                period = spans[middle + stride].start - spans[middle].start
            if (phase := _repeated(spans, stride, num_microbatches, period)) is None:
                break
            phases.append(phase)
        else:
            first, last = max(begin for begin, _ in phases), min(end for _, end in phases)
            if last - first >= 3 * period > 0:
                return first, last, period
    return None


def _repeated(spans: Sequence[Span], stride: int, num_microbatches: int, period: float) -> tuple[float, float] | None:
    """The time around the middle of a row in which each action comes again `period` later, with the microbatch so many
    further on."""

    def comes_again(index: int) -> bool:
        (one, start, _), (other, again, _) = spans[index], spans[index + stride]
        same = one._replace(microbatch=one.microbatch + num_microbatches) == other
        return same and math.isclose(again - start, period, rel_tol=1e-6)

    middle = (len(spans) - stride) // 2
    if not comes_again(middle):
        return None
    first = last = middle
    while first > 0 and comes_again(first - 1):
        first -= 1
    while last + 1 < len(spans) - stride and comes_again(last + 1):
        last += 1
    return spans[first].start, spans[last + stride].end
