"""Schedules against each other, drawn: time against memory. Needs matplotlib, of the extra `viz`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import Plan, Simulation
from .charts import save_figure
from .extras import import_extra
from .memory import MICROBATCHES, Memory, bytes_in_words
from .palette import ACCENT, LIGHT, LIMIT_COLOUR

__all__ = ["draw_comparison", "points_of", "save_comparison", "time_axis"]


class Point(NamedTuple):
    """Schedules that take the same time and memory."""

    time: float
    memory: float
    """The most that a rank holds."""
    label: str
    fits: bool
    """Into the limit of memory."""


def save_comparison(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory: Memory = MICROBATCHES, unit: str = ""
) -> None:
    """Save time against memory as .svg or .png, by the ending of `path`: a point per schedule.

    Args:
        rows: plans for the same ranks and microbatches, each with its simulation.
        memory: what is counted of it. A limit is drawn as a line; schedules beyond it are grey.
        unit: of the simulations' times.

    Raises:
        ValueError: matplotlib is not installed.
    """
    save_figure(draw_comparison(rows, memory, unit), path)


def draw_comparison(rows: Sequence[tuple[Plan, Simulation]], memory: Memory, unit: str) -> Any:
    """The picture of `save_comparison`, as a figure of matplotlib's."""
    import_extra("matplotlib")
    from matplotlib.figure import Figure

    points, limit = points_of(rows, memory), memory.limit
    figure = Figure(figsize=(8, 5), layout="constrained", facecolor=LIGHT.page)
    axes = figure.subplots()
    for fits, colour in ((True, ACCENT), (False, LIGHT.faint)):
        shown = [point for point in points if point.fits == fits]
        axes.scatter([p.time for p in shown], [p.memory for p in shown], s=42, color=colour, zorder=3)
    axes.margins(x=0.15, y=0.12)
    axes.set_ylim(bottom=0, top=1.15 * max([point.memory for point in points] + [limit or 0]))
    if limit is not None:
        axes.axhline(limit, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
        place = (1, limit)
        axes.annotate(
            f"limit {memory.in_words(limit)}", place, (-4, 3), axes.get_yaxis_transform(), "offset points",
            ha="right", color=LIMIT_COLOUR, fontsize=9,
        )  # fmt: skip
    if memory.in_bytes:
        axes.yaxis.set_major_formatter(lambda amount, _: bytes_in_words(amount))
    axes.set_xlabel(time_axis(unit), color=LIGHT.text)
    axes.set_ylabel(memory.name, color=LIGHT.text)
    axes.set_facecolor(LIGHT.page)
    axes.tick_params(colors=LIGHT.text)
    axes.grid(color=LIGHT.wait, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    _place_labels(figure, axes, points, limit)
    return figure


def time_axis(unit: str) -> str:
    return "time of a step" + (f", {unit}" if unit else "")


def points_of(rows: Iterable[tuple[Plan, Simulation]], memory: Memory) -> list[Point]:
    """One point for all schedules in the same place, with all their names."""
    places: dict[tuple[float, float], list[str]] = {}
    for plan, simulation in rows:
        place = round(simulation.makespan, 9), round(memory.of(simulation), 9)
        chunks = f" x{plan.num_chunks}" if plan.num_chunks > 1 else ""
        slices = f", {plan.num_slices} slices" if plan.num_slices > 1 else ""
        places.setdefault(place, []).append(plan.name + chunks + slices)
    return [
        Point(time, held, ", ".join(names), memory.limit is None or held <= memory.limit)
        for (time, held), names in places.items()
    ]


# Directions and distance from a point, the best first.
LABEL_PLACES = [
    (right, up, distance)
    for distance in (8, 16, 28, 42, 60, 80)
    for right, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]


def _place_labels(figure: Any, axes: Any, points: Sequence[Point], memory_limit: float | None) -> None:
    """Each label beside its point, at the nearest place where there is nothing yet: no label, point or line."""
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    frame = axes.get_window_extent()
    centres = axes.transData.transform([(point.time, point.memory) for point in points])
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in centres]
    if memory_limit is not None:
        _, height = axes.transData.transform((0, memory_limit))
        taken.append(Bbox.from_extents(frame.xmin, height - 3, frame.xmax, height + 3))
    for point in points:
        for right, up, distance in LABEL_PLACES:
            text = axes.annotate(
                point.label,
                (point.time, point.memory),
                (right * distance, up * distance),
                textcoords="offset points",
                ha=("center", "left", "right")[right],
                va=("center", "bottom", "top")[up],
                fontsize=9,
                color=LIGHT.text,
                arrowprops={"arrowstyle": "-", "color": LIGHT.faint, "linewidth": 0.7} if distance > 8 else None,
            )
            text.get_window_extent()  # with the line to its point; moves the text to where it will be
            box = Text.get_window_extent(text)
            if not box.count_overlaps(taken) and frame.contains(*box.min) and frame.contains(*box.max):
                taken.append(box)
                break
            text.remove()
        else:
            axes.annotate(
                point.label, (point.time, point.memory), fontsize=9, color=LIGHT.text
            )  # over others, but there
