"""A plan or a measured step in characters: as plain text, and as rows for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from ..plan import Action, Plan, Span

__all__ = ["Segment", "as_text", "text_rows"]


def as_text(plan: Plan, forward: int = 1, backward_input: int = 1, backward_weight: int = 1) -> str:
    """A simulated plan in plain text: a row per rank, a column per unit of time, `.` where the rank waits.

    Args:
        forward, backward_input, backward_weight: the times of F, B and W of one stage, or of a slice on it, in whole
            units. An action is written as often as it takes units.
    """
    times = (forward, backward_input, backward_weight)
    simulation = plan.simulate(*(time * plan.num_chunks * plan.num_slices for time in times))
    num_units = round(simulation.makespan)
    rows = []
    for spans in simulation.spans:
        cells = ["."] * num_units
        for action, start, end in spans:
            for unit in range(round(start), round(end)):
                cells[unit] = str(action)
        rows.append(cells)
    width = max(len(cell) for row in rows for cell in row)
    return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in rows)


class Segment(NamedTuple):
    """A piece of a rank's row: some columns of text, and the action they show (None where the rank waits)."""

    text: str
    action: Action | None


def text_rows(ranks: Sequence[Sequence[Span]], width: int, duration: float) -> list[list[Segment]]:
    """A row of segments per rank. Each action is named as fully as its width allows.

    Args:
        ranks: the actions of each rank, with start and end in any unit of time.
        width: columns of a row.
        duration: the time that `width` columns stand for, from the first action of all ranks on, in the same unit.
    """
    begin = min(spans[0].start for spans in ranks)
    scale = width / duration
    labels = _choose_labels([span for spans in ranks for span in spans], scale)
    rows = []
    for spans in ranks:
        row: list[Segment] = []
        column = 0
        for action, start, end in spans:
            first, last = round((start - begin) * scale), round((end - begin) * scale)
            if first > column:
                row.append(Segment(" " * (first - column), None))
            if last > first:
                name = labels[action.kind](action)
                if len(name) > last - first:
                    name = action.kind[0]
                row.append(Segment(name.ljust(last - first), action))
            column = max(column, last)
        row.append(Segment(" " * (width - column), None))
        rows.append(row)
    return rows


def _choose_labels(spans: list[Span], scale: float) -> dict[str, Callable[[Action], str]]:
    """For each kind of action, the longest of its names that fits in more than 80 % of its places, with a column free
    between neighbours."""
    names: tuple[Callable[[Action], str], ...] = (
        str,
        lambda action: f"{action.kind[0]}{action.unit}",
        lambda action: action.unit,
        lambda action: str(action.microbatch),
        lambda action: action.kind[0],
    )
    labels = {}
    for kind in {span.action.kind for span in spans}:
        own = [span for span in spans if span.action.kind == kind]
        fitting = [n for n in names if fmean(len(n(s.action)) < int((s.end - s.start) * scale) for s in own) > 0.8]
        labels[kind] = (fitting or names[-1:])[0]
    return labels
