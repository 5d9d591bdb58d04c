"""Timelines and figures in a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

from ...plan import Plan, Span
from ..text import text_rows
from ..timeline import Timeline

__all__ = ["listed", "print_hint", "print_timeline"]

WIDEST = 10_000
"""The most columns of a timeline: far more than a terminal has, and still quick to print."""


def print_timeline(plan: Plan, ranks: Sequence[Sequence[Span]], width: int | None, duration: float) -> None:
    prefix = len(f"rank {plan.pp_size - 1} ")
    columns = max(20, (width or shutil.get_terminal_size((120, 24)).columns) - prefix)
    if columns > WIDEST:
        raise ValueError(f"{columns} columns are more than any terminal has: choose a --width of {WIDEST:,} at most.")
    rows = text_rows(ranks, columns, duration)
    console = _console()
    for rank, row in enumerate(rows):
        name = f"rank {rank}".ljust(prefix)
        if console is None:
            print(name + "".join(text if action else "." * len(text) for text, action in row))
        else:
            from rich.text import Text

            line = Text(name, no_wrap=True, overflow="crop")
            for text, action in row:
                line.append(text, style=_STYLES[action.kind][plan.chunk_of(action.stage) % 2] if action else "")
            console.print(line)


# Per kind of action, the colours of even and odd chunks.
_STYLES = {
    "F": ("black on bright_blue", "white on blue"),
    "BW": ("black on bright_green", "white on green"),
    "B": ("black on bright_green", "white on green"),
    "W": ("black on bright_yellow", "black on yellow"),
}


def _console() -> Any:
    """rich's console, where it is installed and the output is a terminal with colours."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal and console.color_system is not None else None


def print_hint(measured: Timeline) -> None:
    """Say so where the Ws take less than a tenth of the Bs: with layers that defer they take about as long."""
    times = measured.mean_times
    if "W" in times and sum(times["W"]) < 0.1 * sum(times["B"]):
        print(
            "hint       the weight-gradient passes (W) are all but empty: the layers compute their weight gradients in "
            "B. To defer them, see megapipe.weight_grad.convert"
        )


def listed(values: Sequence[float], form: str, unit: str = "", what: str = "rank") -> str:
    texts = [format(value, form) for value in values]
    return f"{texts[0]}{unit} on every {what}" if len(set(texts)) == 1 else " ".join(texts) + unit
