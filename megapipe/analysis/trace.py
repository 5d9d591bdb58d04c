"""A plan and measured steps as a trace for Perfetto (https://ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..plan import Plan, RankStep, Simulation, Span

__all__ = ["save_trace"]

UNIT_US = 1e3
"""Microseconds, the unit of traces, in a millisecond. A simulation's unit of time is shown as a millisecond."""


def save_trace(
    plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[Sequence[RankStep]] = ()
) -> None:
    """Save a trace in Chrome's JSON format: a process for the plan, with a thread per rank.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: the steps of a timeline, in milliseconds, per step and rank. They are shown with their waits as
            another process above the plan.
    """
    events = list(_rows(1 if measured else 0, "plan", simulation.spans))
    if measured:
        spans = [[span for step in measured for span in step[rank].spans] for rank in range(plan.pp_size)]
        events += _rows(0, "measured", spans)
    for step in measured:
        for rank, one in enumerate(step):
            for action, start, end in one.waits:
                name = "last sends" if action is None else f"wait of {action}"
                events.append(_event(0, rank, name, "wait", start, end))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _rows(process: int, name: str, ranks: Sequence[Sequence[Span]]) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for rank, spans in enumerate(ranks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        for action, start, end in spans:
            event = _event(process, rank, str(action), action.kind, start, end)
            yield {**event, "args": {name: value for name, value in action._asdict().items() if name != "kind"}}


def _event(process: int, rank: int, name: str, kind: str, start: float, end: float) -> dict[str, object]:
    times = {"ts": start * UNIT_US, "dur": end * UNIT_US - start * UNIT_US}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": rank, **times}
