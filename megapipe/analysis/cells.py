"""What a timeline shows of a rank: its actions, overlapped pairs as one, and how many microbatches it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan import KINDS, Action, Kind, Plan, Span, held_changes

__all__ = ["Cell", "Level", "cells_of", "kinds_in", "levels_of"]


class Cell(NamedTuple):
    """A place in a rank's row."""

    actions: tuple[Action, ...]
    """One, or the F and the B of an overlapped pair."""
    start: float
    end: float

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(action.kind for action in self.actions)


def cells_of(plan: Plan, ranks: Sequence[Sequence[Span]]) -> list[list[Cell]]:
    """A row of cells per rank.

    Args:
        ranks: the plan's actions of one or more steps, with start and end in any unit.
    """
    rows = []
    for spans, actions, pairs in zip(ranks, plan.actions, plan.program.pairs):
        row: list[Cell] = []
        backward = -1  # of the pair whose forward came last
        for index, (action, start, end) in enumerate(spans):
            if index % len(actions) == backward:
                forward = row.pop()
                row.append(Cell((*forward.actions, action), forward.start, end))
            else:
                row.append(Cell((action,), start, end))
            backward = pairs.get(index % len(actions), -1)
        rows.append(row)
    return rows


class Level(NamedTuple):
    """How long a rank holds so many microbatches, counted as `Simulation.peak_activations` counts them."""

    held: float
    start: float
    end: float


def levels_of(plan: Plan, ranks: Sequence[Sequence[Span]]) -> list[list[Level]]:
    """The microbatches in flight on each rank over time, each from the start of its F, or of its R, to the end of its
    W."""
    rows = []
    share = 1 / (plan.num_chunks * plan.num_slices)
    for spans, actions in zip(ranks, plan.actions):
        held_by = held_changes(actions).tolist()
        holds = [(held_by[index % len(held_by)], start, end) for index, (_, start, end) in enumerate(spans)]
        changes = [(start if change > 0 else end, change) for change, start, end in holds if change]
        row: list[Level] = []
        held, before = 0, spans[0].start
        for time, change in sorted(changes):
            if time > before:
                row.append(Level(held * share, before, time))
            held, before = held + change, time
        rows.append(row)
    return rows


def kinds_in(plan: Plan) -> list[Kind]:
    """The kinds of action that a plan has."""
    names = {kind for row in plan.actions for _, kind in row.words}
    return [kind for name, kind in KINDS.items() if name in names and any(a.kind == name for a in plan.actions[0])]
