"""A plan or a measured step in characters: as plain text, and as rows for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import NamedTuple

from ..plan import Action, Plan
from .cells import Cell, Level

__all__ = ["COLOURED", "Form", "Segment", "as_text", "level_rows", "plain_forms", "text_rows"]


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


class Form(NamedTuple):
    """A way to name an action."""

    name: Callable[[Action], str]
    note: str = ""
    """What a legend says of it."""
    small_letters: bool = False
    """Those of odd chunks are small. Names that begin with a letter need no free column between them."""


STAGE_AND_UNIT = Form(str, "2F0: of microbatch 0 through stage 2")
KIND_AND_UNIT = "F0: of microbatch 0"

COLOURED = (
    STAGE_AND_UNIT,
    Form(lambda action: f"{action.kind[0]}{action.unit}", KIND_AND_UNIT),
    Form(lambda action: action.unit, "0: of microbatch 0"),
    Form(lambda action: str(action.microbatch), "0: of microbatch 0"),
    Form(lambda action: action.kind[0]),
)
"""The longest first, for terminals where colours tell F, B, W and chunks apart."""


def plain_forms(plan: Plan) -> tuple[Form, ...]:
    """The same without colours: there is a letter in each."""

    def letter(action: Action) -> str:
        return action.kind[0].lower() if plan.chunk_of(action.stage) % 2 else action.kind[0]

    return (
        STAGE_AND_UNIT,
        Form(lambda action: f"{letter(action)}{action.unit}", KIND_AND_UNIT, small_letters=True),
        Form(letter, small_letters=True),
    )


class Segment(NamedTuple):
    """A piece of a rank's row: some columns of text, and the cell they show (None where the rank waits)."""

    text: str
    cell: Cell | None


def text_rows(
    rows: Sequence[Sequence[Cell]], width: int, duration: float, forms: Sequence[Form] = COLOURED
) -> tuple[list[list[Segment]], list[Form]]:
    """A row of segments per rank, and the forms that their names have. Each action is named as fully as its width
    allows, a pair as `0F4+7B0`.

    Args:
        rows: of each rank, in any unit of time.
        width: columns of a row.
        duration: the time that `width` columns stand for, from the first action of all ranks on, in the same unit.
    """
    begin = min(cells[0].start for cells in rows)
    scale = width / duration
    names = _choose_names([cell for cells in rows for cell in cells], scale, forms)
    texts = []
    for cells in rows:
        row: list[Segment] = []
        column = 0
        for cell in cells:
            first, last = round((cell.start - begin) * scale), round((cell.end - begin) * scale)
            if first > column:
                row.append(Segment(" " * (first - column), None))
            if last > first:
                name = _name(cell, names[cell.kinds])
                if len(name) > last - first:
                    name = "".join(map(forms[-1].name, cell.actions))[: last - first]
                row.append(Segment(name.ljust(last - first), cell))
            column = max(column, last)
        row.append(Segment(" " * (width - column), None))
        texts.append(row)
    return texts, [form for form in forms if form in names.values()]


BLOCKS = " ▁▂▃▄▅▆▇█"


def level_rows(rows: Sequence[Sequence[Level]], width: int, duration: float) -> list[str]:
    """A row of blocks per rank, as high as what it holds: the highest for the most that any rank does.

    Args:
        rows, width, duration: as in `text_rows`.
    """
    begin = min(levels[0].start for levels in rows)
    most = max(level.held for levels in rows for level in levels) or 1.0
    texts = []
    for levels in rows:
        heights = [0.0] * width
        for held, start, end in levels:
            first, last = ((time - begin) * width / duration for time in (start, end))
            for column in range(int(first), min(width, max(int(first) + 1, round(last)))):
                heights[column] = max(heights[column], held)
        texts.append("".join(BLOCKS[round(height / most * (len(BLOCKS) - 1))] for height in heights).rstrip())
    return texts


def _name(cell: Cell, form: Form) -> str:
    return "+".join(map(form.name, cell.actions))


def _choose_names(cells: list[Cell], scale: float, forms: Sequence[Form]) -> dict[tuple[str, ...], Form]:
    """The longest name of each kind of cell that fits in more than 80 % of its places."""
    names = {}
    for kinds in {cell.kinds for cell in cells}:
        own = [(cell, int((cell.end - cell.start) * scale)) for cell in cells if cell.kinds == kinds]
        fitting = [
            form
            for form in forms
            if fmean(len(_name(cell, form)) + (not form.small_letters) <= width for cell, width in own) > 0.8
        ]
        names[kinds] = (fitting or forms[-1:])[0]
    return names
