"""A schedule as a picture."""

from __future__ import annotations

from .plan import Plan

__all__ = ["as_text"]


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
