"""Tables: printed as they come, and kept as Markdown with the machine, the versions and the command."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median, quantiles

import torch

Table = tuple[str, str, str, Sequence[Sequence[str]], str]
"""Its name, title, header, rows and notes."""
FOLDER = Path(__file__).parent / "results"
CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"


def median_and_spread(values: Sequence[float], form: str = "{:.3f}") -> str:
    """The median, and the middle half of the values."""
    if len(values) < 4:
        return form.format(median(values))
    low, _, high = quantiles(values, n=4)
    return f"{form.format(median(values))} ({form.format(low)}-{form.format(high)})"


def save_table(
    name: str, title: str, header: str, rows: Sequence[Sequence[str]], notes: str = "", folder: Path = FOLDER
) -> None:
    """Print a table, and write it to `results/NAME.md`; measured with another torch than `make` installs by itself, to
    a file of its own that bears the version."""
    if f"torch=={_torch()}\n" not in CONSTRAINTS.read_text():
        name, title = f"{name}-torch-{_torch()}", f"{title}, torch {_torch()}"
    headings = header.split(" | ")
    widths = [max(len(str(row[k])) for row in [headings, *rows]) for k in range(len(headings))]

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(str(cell).ljust(width) for cell, width in zip(cells, widths)) + " |"

    table = "\n".join([line(headings), "|" + "|".join("-" * (width + 2) for width in widths) + "|", *map(line, rows)])
    text = f"**{title}**\n\n{table}\n\n" + (f"{notes}\n\n" if notes else "") + f"{_origin()}\n"
    print(text, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text)


def _torch() -> str:
    return torch.__version__.partition("+")[0]


def _origin() -> str:
    main = sys.modules["__main__"]
    module = main.__spec__.name if getattr(main, "__spec__", None) else Path(sys.argv[0]).name
    command = " ".join(["python -m", module, *sys.argv[1:]])
    packages = [f"torch {torch.__version__}", *filter(None, map(_version, ("megatron-core", "dualpipe")))]
    return (
        f"`{command}`, {date.today()}, {_processor()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"{', '.join(packages)}."
    )


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
