"""Plans, measured steps and tables in characters, as wide as the terminal: 80 columns where there is none."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, TextIO

from ..plan import KINDS, Action, Plan, Span, Standstill
from .timeline_cells import Cell, cells_of, ink_on, kinds_in, shade_of

PREFIXES = "kMGTP"

WIDEST = 10_000
"""The most columns of a timeline: far more than a terminal has, and still quick to print."""


def as_text(plan: Plan, forward: int = 1, backward_input: int = 1, backward_weight: int = 1) -> str:
    """A simulated plan in plain text: a row per rank, a column per unit of time, `.` where the rank waits.

    Args:
        forward, backward_input, backward_weight: the times of F, B and W of one stage, or of a slice on it, in whole
            units. An action is written as often as it takes units.
    """
    times = (forward, backward_input, backward_weight)
    simulation = plan.simulate(*(time * plan.num_chunks * plan.num_slices for time in times))
    return _grid(simulation.spans, [[] for _ in simulation.spans])


def standstill_as_text(standstill: Standstill) -> str:
    """A step as far as it goes: `1B0?` where the rank waits for ever, `!` where it stops with an error."""
    marks = [
        [f"{action}?"] if action is not None else ["!"] * bool(reason)
        for action, reason in zip(standstill.stands_at, standstill.reasons)
    ]
    return _grid(standstill.spans, marks)


def _grid(rows: Sequence[Sequence[Span]], marks: Sequence[Sequence[str]]) -> str:
    """
    Args:
        rows: by rank, with starts and ends in whole units.
        marks: by rank, what is written behind the last action.
    """
    cells_of_rank = []
    num_units = max(round(row[-1].end) if row else 0 for row in rows)
    for spans, own in zip(rows, marks):
        cells = ["."] * num_units
        for action, start, end in spans:
            for unit in range(round(start), round(end)):
                cells[unit] = str(action)
        last = round(spans[-1].end) if spans else 0
        cells[last : last + len(own)] = own
        cells_of_rank.append(cells)
    width = max(len(cell) for row in cells_of_rank for cell in row)
    return "\n".join(" ".join(cell.ljust(width) for cell in row).rstrip() for row in cells_of_rank)


# Lines


def say(text: str) -> None:
    """Print a line, or several where it is longer than the terminal: broken between words, indented as figures are."""
    print(textwrap.fill(text, _width(), subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False))


def _width() -> int:
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def listed(values: Sequence[float] | Sequence[str], form: str, unit: str = "", what: str = "rank") -> str:
    texts = [format(value, form) for value in values]
    return f"{texts[0]}{unit} on every {what}" if len(set(texts)) == 1 else " ".join(texts) + unit


def bytes_in_words(number: float) -> str:
    """Bytes in the largest unit of which there is one at least: 35.3 GB."""
    power = 0
    while number >= 999.5 and power < len(PREFIXES):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {PREFIXES[power - 1] if power else ''}B"


def print_table(columns: Mapping[str, Sequence[str]], left: Collection[str], may_go: Sequence[str] = ()) -> None:
    """Print texts by column, below their headings. A column without any is left out.

    Args:
        left: headings of the columns that are flush left.
        may_go: those that are left out where the terminal is too narrow, the first ones first.
    """
    shown = {name: [name, *texts] for name, texts in columns.items() if texts}
    widths = {name: max(map(len, texts)) for name, texts in shown.items()}
    gone = []
    for name in may_go:
        if name in widths and sum(widths.values()) + 2 * (len(widths) - 1) > _width():
            gone.append(name)
            del widths[name]
    for line in zip(*(shown[name] for name in widths)):
        texts = (f"{text:{'<' if name in left else '>'}{width}}" for text, (name, width) in zip(line, widths.items()))
        print("  ".join(texts).rstrip())
    if gone:
        say(f"left out, since {_width()} columns are too few: {', '.join(gone)}")


# Timelines


class Form(NamedTuple):
    """A way to name an action."""

    name: Callable[[Action], str]
    note: str = ""
    """What a legend says of it."""
    small_letters: bool = False
    """Those of odd chunks are small. Names that begin with a letter need no free column between them."""


def forms_of(plan: Plan) -> tuple[Form, ...]:
    """The ways to name an action, the longest first. Each has a letter: for terminals without colours."""

    def letter(action: Action) -> str:
        return action.kind[0].lower() if plan.chunk_of(action.stage) % 2 else action.kind[0]

    return (
        Form(str, "2F0: of microbatch 0 through stage 2"),
        Form(lambda action: f"{letter(action)}{action.unit}", "F0: of microbatch 0", small_letters=True),
        Form(letter, small_letters=True),
    )


def is_closed() -> bool:
    """Whether this process was started without an output, as by `>&-`: `print` does nothing then."""
    output: TextIO | None = sys.stdout
    return output is None


def _has_colours() -> bool:
    is_terminal = not is_closed() and sys.stdout.isatty()
    return is_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"


def _coloured(text: str, kind: str, chunk: int, num_chunks: int) -> str:
    """The text in the kind's colour, by the terminal's codes: true ones, or the nearest of its 216."""
    colour = shade_of(KINDS[kind], chunk, num_chunks)
    codes = []
    for ground, of in ((38, ink_on(colour)), (48, colour)):
        red, green, blue = bytes.fromhex(of[1:])
        if os.environ.get("COLORTERM") in ("truecolor", "24bit"):
            codes.append(f"{ground};2;{red};{green};{blue}")
        else:
            codes.append(f"{ground};5;{16 + 36 * round(red / 51) + 6 * round(green / 51) + round(blue / 51)}")
    return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"


def print_timeline(plan: Plan, ranks: Sequence[Sequence[Span]], width: int | None, duration: float) -> list[Form]:
    """Print a row for each rank.

    Args:
        duration: the time that a row stands for, from the first action of all ranks on.

    Returns:
        The forms of the names, for the legend.
    """
    prefix = len(f"rank {plan.pp_size - 1} ")
    columns = max(20, (width or _width()) - prefix)
    if columns > WIDEST:
        raise ValueError(f"{columns} columns are more than any terminal has: choose a --width of {WIDEST:,} at most.")
    rows, used = text_rows(cells_of(plan, ranks), columns, duration, forms_of(plan))
    for rank, row in enumerate(rows):
        print(f"rank {rank}".ljust(prefix) + "".join(_painted(plan, text, cell) for text, cell in row))
    return used


def _painted(plan: Plan, text: str, cell: Cell | None) -> str:
    """A pair has F's colour on the left and B's on the right. Dots for waits, where there are no colours."""
    if not _has_colours():
        return text if cell else "." * len(text)
    actions = cell.actions if cell else ()
    share = len(text) / max(1, len(actions))
    pieces = [text[round(index * share) : round((index + 1) * share)] for index in range(len(actions))]
    return (
        "".join(_coloured(t, a.kind, plan.chunk_of(a.stage), plan.num_chunks) for t, a in zip(pieces, actions)) or text
    )


def print_legend(plan: Plan, used: Sequence[Form]) -> None:
    """What the letters and colours of a timeline mean."""
    notes = [form.note for form in used if form.note]
    if plan.num_slices > 1 and notes:
        notes.append(f"{notes[0].partition(':')[0]}.1: of its slice 1")
    if plan.num_chunks > 1 and any(form.small_letters for form in used):
        notes.append("small letters: odd chunks")
    if any(plan.program.pairs):
        notes.append("F+B: an overlapped pair")
    names = [f"{kind.name[0]} {kind.label}" for kind in kinds_in(plan)]
    text = "legend     " + "; ".join([", ".join([*names, ". idle"]), *notes])
    if not _has_colours():
        say(text)
        return
    lines = textwrap.fill(text, _width(), subsequent_indent=" " * 11, break_long_words=False)
    for kind in kinds_in(plan):
        lines = lines.replace(
            f" {kind.name[0]} {kind.label}", f" {_coloured(kind.name[0], kind.name, 0, 1)} {kind.label}"
        )
    print(lines)


class Segment(NamedTuple):
    """A piece of a rank's row: some columns of text, and the cell they show (None where the rank waits)."""

    text: str
    cell: Cell | None


def text_rows(
    rows: Sequence[Sequence[Cell]], width: int, duration: float, forms: Sequence[Form]
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
