"""Timelines and figures in a terminal."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ...plan import KINDS, WEIGHTS, Plan, Span
from ..cells import Held, cells_of, kinds_in, levels_in_bytes
from ..palette import ink_on
from ..text import COLOURED, Form, level_rows, plain_forms, text_rows
from ..timeline import Timeline

__all__ = ["listed", "print_hint", "print_legend", "print_table", "print_timeline", "say"]

WIDEST = 10_000
"""The most columns of a timeline: far more than a terminal has, and still quick to print."""


def say(text: str) -> None:
    """Print a line. A terminal that is narrower gets it in several, broken between words, indented as figures are."""
    if sys.stdout.isatty():
        text = textwrap.fill(text, _width(), subsequent_indent=" " * 11, break_long_words=False, break_on_hyphens=False)
    print(text)


def _width() -> int:
    return max(20, shutil.get_terminal_size().columns)


def print_table(columns: Mapping[str, Sequence[str]], left: Collection[str], may_go: Sequence[str] = ()) -> None:
    """Print texts by column, below their headings. A column without any is left out.

    Args:
        left: headings of the columns that are flush left.
        may_go: those that are left out where the terminal is too narrow, the first ones first.
    """
    shown = {name: [name, *texts] for name, texts in columns.items() if texts}
    widths = {name: max(map(len, texts)) for name, texts in shown.items()}
    gone = []
    for name in may_go if sys.stdout.isatty() else ():
        if name in widths and sum(widths.values()) + 2 * (len(widths) - 1) > _width():
            gone.append(name)
            del widths[name]
    for line in zip(*(shown[name] for name in widths)):
        texts = (f"{text:{'<' if name in left else '>'}{width}}" for text, (name, width) in zip(line, widths.items()))
        print("  ".join(texts).rstrip())
    if gone:
        say(f"left out, since this terminal is narrow: {', '.join(gone)}")


def print_timeline(
    plan: Plan,
    ranks: Sequence[Sequence[Span]],
    width: int | None,
    duration: float,
    memory: Sequence[Held] | None = None,
) -> list[Form]:
    """Print a row for each rank, and one below it for the bytes that it holds, where they are known.

    Returns:
        The forms of the names, for the legend.
    """
    prefix = len(f"rank {plan.pp_size - 1} ")
    columns = max(20, (width or shutil.get_terminal_size((120, 24)).columns) - prefix)
    if columns > WIDEST:
        raise ValueError(f"{columns} columns are more than any terminal has: choose a --width of {WIDEST:,} at most.")
    console = _console()
    forms = plain_forms(plan) if console is None else COLOURED
    rows, used = text_rows(cells_of(plan, ranks), columns, duration, forms)
    levels = [] if memory is None else level_rows(levels_in_bytes(ranks, memory), columns, duration)
    for rank, row in enumerate(rows):
        name = f"rank {rank}".ljust(prefix)
        if console is None:
            print(name + "".join(text if cell else "." * len(text) for text, cell in row))
        else:
            from rich.text import Text

            line = Text(name, no_wrap=True, overflow="crop")
            for text, cell in row:
                actions = cell.actions if cell else ()
                if not actions:
                    line.append(text)
                for index, action in enumerate(actions):  # a pair has F's colour on the left and B's on the right
                    share = len(text) / len(actions)
                    piece = text[round(index * share) : round((index + 1) * share)]
                    line.append(piece, style=_style(action.kind, plan.chunk_of(action.stage)))
            console.print(line)
        if levels:
            print(" " * prefix + levels[rank])
    return used


def print_legend(plan: Plan, used: Sequence[Form]) -> None:
    """What the letters and colours of a timeline mean."""
    console = _console()
    kinds = kinds_in(plan)
    notes = [form.note for form in used if form.note]
    if plan.num_slices > 1 and notes:
        notes.append(f"{notes[0].partition(':')[0]}.1: of its slice 1")
    if console is None and plan.num_chunks > 1 and any(form.small_letters for form in used):
        notes.append("small letters: odd chunks")
    if any(plan.program.pairs):
        notes.append("F+B: an overlapped pair")
    if console is None:
        names = [f"{kind.name[0]} {kind.label}" for kind in kinds]
        say("legend     " + "; ".join([", ".join([*names, ". idle"]), *notes]))
        return
    from rich.text import Text

    line = Text("legend     ")
    for kind in kinds:
        for chunk in range(min(plan.num_chunks, 2)):
            line.append(f" {kind.name[0]} ", style=_style(kind.name, chunk))
        line.append(f" {kind.label}  ")
    line.append("; ".join(["dark: odd chunks"] * (plan.num_chunks > 1) + notes))
    console.print(line, soft_wrap=False)


def _style(kind: str, chunk: int) -> str:
    colour = KINDS[kind].colours[chunk % 2]
    return f"{ink_on(colour)} on {colour}"


def _console() -> Any:
    """rich's console, where it is installed and the output is a terminal with colours."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, soft_wrap=True)
    has_colours = console.is_terminal and console.color_system is not None and not console.no_color
    return console if has_colours else None


def print_hint(measured: Timeline) -> None:
    """Say so where the Ws take less than a tenth of the Bs: with layers that defer they take about as long."""
    times = measured.mean_times
    if WEIGHTS.name in times and sum(times[WEIGHTS.name]) < 0.1 * sum(times[WEIGHTS.after or ""]):
        say(
            "hint       the weight-gradient passes (W) are all but empty: the layers compute their weight gradients in "
            "B. To defer them, see megapipe.weight_grad.convert"
        )


def listed(values: Sequence[float] | Sequence[str], form: str, unit: str = "", what: str = "rank") -> str:
    texts = [format(value, form) for value in values]
    return f"{texts[0]}{unit} on every {what}" if len(set(texts)) == 1 else " ".join(texts) + unit
