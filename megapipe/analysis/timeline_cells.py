"""What a timeline shows of a rank: its actions, overlapped pairs as one, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..plan import KINDS, Action, Kind, Plan, Simulation, Span, held_changes

Held = tuple[Sequence[float], Sequence[float]]
"""The bytes of a rank during each of its actions, and after it."""


class Scheme(NamedTuple):
    """The colours around the actions. With those of actions (`KINDS`) they are told apart in print, in light and dark
    pages, and by the colour-blind."""

    page: str
    text: str
    faint: str
    """Lines and what matters less."""
    wait: str


LIGHT = Scheme("#ffffff", "#1f2328", "#8c959f", "#dfe3e8")
DARK = Scheme("#0d1117", "#e6edf3", "#7d8590", "#30363d")


def shade_of(kind: Kind, chunk: int, num_chunks: int) -> str:
    """The colour of an action: the kind's first one for the first chunk, its second for the last, between them for
    others."""
    ends = [bytes.fromhex(colour[1:]) for colour in kind.colours]
    share = chunk / max(1, num_chunks - 1)
    return "#" + bytes(round(one + share * (other - one)) for one, other in zip(*ends)).hex()


def ink_on(colour: str) -> str:
    """The colour of text on one of the actions' colours: dark on light ones, light on dark ones. It is none of a
    scheme's, which differ from page to page."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111111" if 0.299 * red + 0.587 * green + 0.114 * blue > 128 else "#fafafa"


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
            if not KINDS[action.kind].costs:  # it has no length
                continue
            if index % len(actions) == backward:
                forward = row.pop()
                row.append(Cell((*forward.actions, action), forward.start, end))
            else:
                row.append(Cell((action,), start, end))
            backward = pairs.get(index % len(actions), -1)
        rows.append(row)
    return rows


class Level(NamedTuple):
    """How long a rank holds so much: bytes, or microbatches as `Simulation.peak_activations` counts them."""

    held: float
    start: float
    end: float


def levels_of(plan: Plan, ranks: Sequence[Sequence[Span]]) -> list[list[Level]]:
    """The microbatches in flight on each rank over time, each from the start of its F, or of its R, to the end of its
    W."""
    rows = []
    share = 1 / (plan.num_chunks * plan.num_slices)
    for spans, actions in zip(ranks, plan.actions):
        held_by = held_changes(actions)
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


def levels_in_bytes(ranks: Sequence[Sequence[Span]], memory: Sequence[Held]) -> list[list[Level]]:
    """The bytes held on each rank over time: the most during each action, and what is left after it."""
    rows = []
    for spans, (during, after) in zip(ranks, memory):
        row: list[Level] = []
        for index, span in enumerate(spans):
            if row and span.start > row[-1].end:
                row.append(Level(after[(index - 1) % len(after)], row[-1].end, span.start))
            row.append(Level(during[index % len(during)], span.start, span.end))
        rows.append([level for level in row if level.end > level.start])
    return rows


def held_by_plan(simulation: Simulation) -> list[Held] | None:
    """The bytes of each rank over a plan's actions; None where they are not known."""
    if simulation.memory is None:
        return None
    return [((rank.model + rank.during).tolist(), (rank.model + rank.after).tolist()) for rank in simulation.memory]


def kinds_in(plan: Plan) -> list[Kind]:
    """The kinds of action that a plan has."""
    names = {action.kind for row in plan.actions for action in row}
    return [kind for name, kind in KINDS.items() if name in names and kind.costs]
