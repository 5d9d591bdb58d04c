"""A plan as a picture: in the terminal, as plain text, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from .plan import Plan
from .simulation import Simulation, Span
from .verbs import Action

__all__ = ["Segment", "as_text", "save_trace", "timeline"]


def as_text(plan: Plan, forward: int = 1, backward_input: int = 1, backward_weight: int = 1) -> str:
    """The timeline in plain text: a row per rank, a column per unit of time, `.` where the rank waits.

    The times are those of one stage, in whole units; an action is written as often as it takes units.
    """
    chunks = plan.num_chunks
    simulation = plan.simulate(forward * chunks, backward_input * chunks, backward_weight * chunks)
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
    """A piece of a rank's row: some columns of text, and the action that they show (None where the rank waits)."""

    text: str
    action: Action | None


def timeline(simulation: Simulation, width: int) -> list[list[Segment]]:
    """A row of segments per rank, `width` columns wide, with as much of the actions' names as there is room for."""
    begin = min(spans[0].start for spans in simulation.spans)
    scale = width / simulation.makespan
    labels = _choose_labels([span for spans in simulation.spans for span in spans], scale)
    rows = []
    for spans in simulation.spans:
        row: list[Segment] = []
        column = 0
        for action, start, end in spans:
            first, last = round((start - begin) * scale), round((end - begin) * scale)
            if first > column:
                row.append(Segment(" " * (first - column), None))
            if last > first:
                row.append(Segment(labels[action.kind](action)[: last - first].ljust(last - first), action))
            column = max(column, last)
        row.append(Segment(" " * (width - column), None))
        rows.append(row)
    return rows


def _choose_labels(spans: list[Span], scale: float) -> dict[str, Callable[[Action], str]]:
    """For each kind of action, the longest of its names that fits everywhere, with a column free between neighbours."""
    names: tuple[Callable[[Action], str], ...] = (
        str,
        lambda action: f"{action.kind[0]}{action.microbatch}",
        lambda action: str(action.microbatch),
        lambda action: action.kind[0],
    )
    labels = {}
    for kind in {span.action.kind for span in spans}:
        own = [span for span in spans if span.action.kind == kind]
        fitting = [n for n in names if all(len(n(s.action)) < int((s.end - s.start) * scale) for s in own)]
        labels[kind] = (fitting or names[-1:])[0]
    return labels


def save_trace(plan: Plan, simulation: Simulation, path: str | Path, unit: str = "ms") -> None:
    """A trace in Chrome's JSON format, which Perfetto opens. A unit of the simulation is one `unit` there."""
    microseconds = {"us": 1.0, "ms": 1e3, "s": 1e6}[unit]
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        for rank in range(plan.pp_size)
    ]
    events += [
        {
            "ph": "X",
            "name": str(action),
            "cat": action.kind,
            "pid": 0,
            "tid": rank,
            "ts": start * microseconds,
            "dur": (end - start) * microseconds,
            "args": {"stage": action.stage, "microbatch": action.microbatch},
        }
        for rank, spans in enumerate(simulation.spans)
        for action, start, end in spans
    ]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
