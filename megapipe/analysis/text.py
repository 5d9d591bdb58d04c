"""A plan or a measured step as a picture: in the terminal, as plain text, and as a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from ..plan import Action, Plan, Simulation, Span
from ..runtime import RankStep

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


def timeline(ranks: Sequence[Sequence[Span]], width: int, duration: float) -> list[list[Segment]]:
    """A row of segments per rank, with as much of the actions' names as there is room for.

    Args:
        ranks: what each does.
        width, duration: so many columns stand for so much time, from the first action on.
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
    """For each kind of action, the longest of its names that fits nearly everywhere, with a column free between
    neighbours."""
    names: tuple[Callable[[Action], str], ...] = (
        str,
        lambda action: f"{action.kind[0]}{action.microbatch}",
        lambda action: str(action.microbatch),
        lambda action: action.kind[0],
    )
    labels = {}
    for kind in {span.action.kind for span in spans}:
        own = [span for span in spans if span.action.kind == kind]
        fitting = [n for n in names if fmean(len(n(s.action)) < int((s.end - s.start) * scale) for s in own) > 0.8]
        labels[kind] = (fitting or names[-1:])[0]
    return labels


def save_trace(
    plan: Plan,
    simulation: Simulation,
    path: str | Path,
    unit: str = "ms",
    measured: Sequence[Sequence[RankStep]] = (),
) -> None:
    """A trace in Chrome's JSON format, which Perfetto opens. A unit of the simulation is one `unit` there.

    Args:
        measured: steps, per rank, shown with their waits as another process above the plan.
    """
    unit_us = {"us": 1.0, "ms": 1e3, "s": 1e6}[unit]
    events = list(_trace_rows(1 if measured else 0, "plan", simulation.spans, unit_us))
    if measured:
        spans = [[span for step in measured for span in step[rank].spans] for rank in range(plan.pp_size)]
        events += _trace_rows(0, "measured", spans, unit_us)
    for step in measured:
        for rank, one in enumerate(step):
            for action, start, end in one.waits:
                name = "last sends" if action is None else f"wait of {action}"
                events.append(_trace_event(0, rank, name, "wait", start * unit_us, end * unit_us))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _trace_rows(
    process: int, name: str, ranks: Sequence[Sequence[Span]], unit_us: float
) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for rank, spans in enumerate(ranks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        for action, start, end in spans:
            event = _trace_event(process, rank, str(action), action.kind, start * unit_us, end * unit_us)
            yield {**event, "args": {"stage": action.stage, "microbatch": action.microbatch}}


def _trace_event(process: int, rank: int, name: str, kind: str, start: float, end: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": rank, "ts": start, "dur": end - start}
