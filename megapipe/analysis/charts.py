"""Timelines, and schedules against each other, drawn for documents. Needs matplotlib, of the extra `viz`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import Plan, Simulation, Span
from ..runtime import RankStep
from .extras import import_extra

__all__ = [
    "COLOURS",
    "LIMIT_COLOUR",
    "TITLES",
    "WAIT_COLOUR",
    "axis_names",
    "points_of",
    "save_comparison",
    "save_picture",
]

# Per kind of action, the colours of even and odd chunks.
COLOURS = {
    "F": ("#8fb8e8", "#3f74b5"),
    "BW": ("#a6d49f", "#4c9a52"),
    "B": ("#a6d49f", "#4c9a52"),
    "W": ("#f3d58c", "#c9973a"),
}
WAIT_COLOUR = "#e9e9e9"
TITLES = ("measured: waits for messages in grey, the host in white", "by the plan")
LIMIT_COLOUR = "#c0504d"
BEYOND_COLOUR = "#b0b0b0"


# Timelines


def save_picture(
    plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None
) -> None:
    """Save a timeline as .svg or .png, by the ending of `path`: a row per rank, each action with its microbatch.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: a step of each rank, in milliseconds, drawn above the plan on the same scale, with its waits in grey.

    Raises:
        ValueError: matplotlib is not installed.
    """
    matplotlib = import_extra("matplotlib")
    from matplotlib.figure import Figure

    rows: list[Sequence[Sequence[Span]]] = [simulation.spans]
    if measured is not None:
        rows.insert(0, [step.spans for step in measured])
    ends = [max(spans[-1].end for spans in ranks) for ranks in rows]
    columns = max(ends) / _usual_length(simulation.spans)
    size = (max(6.0, min(40.0, 0.3 * columns)), len(rows) * (0.5 + 0.42 * plan.pp_size))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), sharex=True, squeeze=False)[:, 0]
    for axes, ranks, title in zip(panels, rows, TITLES):
        _draw_timeline(axes, plan, ranks)
        axes.set_xlim(min(spans[0].start for spans in ranks), max(ends))
        if measured is not None:
            axes.set_title(title, loc="left", fontsize=9)
    for rank, step in enumerate(measured or []):
        panels[0].barh(
            [rank] * len(step.waits),
            [wait.end - wait.start for wait in step.waits],
            left=[wait.start for wait in step.waits],
            height=0.5,
            color=WAIT_COLOUR,
        )
        panels[-1].set_xlabel("ms")
    _save(matplotlib, figure, path)


def _draw_timeline(axes: Any, plan: Plan, ranks: Sequence[Sequence[Span]]) -> None:
    for rank, spans in enumerate(ranks):
        for action, start, end in spans:
            colour = COLOURS[action.kind][plan.chunk_of(action.stage) % 2]
            axes.barh(rank, end - start, left=start, height=0.92, color=colour, edgecolor="white", linewidth=0.8)
            axes.text((start + end) / 2, rank, action.unit, ha="center", va="center", fontsize=8, clip_on=True)
    axes.set_yticks(range(plan.pp_size), [f"rank {rank}" for rank in range(plan.pp_size)])
    axes.set_ylim(plan.pp_size - 0.5, -0.5)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def _usual_length(ranks: Sequence[Sequence[Span]]) -> float:
    """The time of a short action, longer than one in twenty. The width of a picture follows from it."""
    lengths = sorted(span.end - span.start for spans in ranks for span in spans)
    return lengths[len(lengths) // 20]


# Schedules against each other


class Point(NamedTuple):
    """Schedules that take the same time and memory."""

    time: float
    memory: float
    """The peak of activations, in microbatches of a whole rank."""
    label: str
    fits: bool
    """Into the limit of memory."""


def save_comparison(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory_limit: float | None = None, unit: str = ""
) -> None:
    """Save time against memory as .svg or .png, by the ending of `path`: a point per schedule.

    Args:
        rows: plans for the same ranks and microbatches, each with its simulation.
        memory_limit: drawn as a line, in microbatches of a whole rank. Schedules beyond it are grey.
        unit: of the simulations' times.

    Raises:
        ValueError: matplotlib is not installed.
    """
    matplotlib = import_extra("matplotlib")
    from matplotlib.figure import Figure

    points = points_of(rows, memory_limit)
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for fits, colour in ((True, COLOURS["F"][1]), (False, BEYOND_COLOUR)):
        shown = [point for point in points if point.fits == fits]
        axes.scatter([p.time for p in shown], [p.memory for p in shown], s=42, color=colour, zorder=3)
    axes.margins(x=0.15, y=0.12)
    axes.set_ylim(bottom=0, top=1.15 * max([point.memory for point in points] + [memory_limit or 0]))
    if memory_limit is not None:
        axes.axhline(memory_limit, color=LIMIT_COLOUR, linewidth=1, linestyle="--")
        place = (1, memory_limit)
        axes.annotate(
            f"limit {memory_limit:g}", place, (-4, 3), axes.get_yaxis_transform(), "offset points",
            ha="right", color=LIMIT_COLOUR, fontsize=9,
        )  # fmt: skip
    time, memory = axis_names(unit)
    axes.set_xlabel(time)
    axes.set_ylabel(memory)
    axes.grid(color="#eeeeee", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    _place_labels(figure, axes, points, memory_limit)
    _save(matplotlib, figure, path)


def axis_names(unit: str) -> tuple[str, str]:
    return "time of a step" + (f", {unit}" if unit else ""), "microbatches held on the fullest rank"


def points_of(rows: Iterable[tuple[Plan, Simulation]], memory_limit: float | None) -> list[Point]:
    """One point for all schedules in the same place, with all their names."""
    places: dict[tuple[float, float], list[str]] = {}
    for plan, simulation in rows:
        place = round(simulation.makespan, 9), round(max(simulation.peak_activations), 9)
        chunks = f" x{plan.num_chunks}" if plan.num_chunks > 1 else ""
        slices = f", {plan.num_slices} slices" if plan.num_slices > 1 else ""
        places.setdefault(place, []).append(plan.name + chunks + slices)
    return [
        Point(time, memory, ", ".join(names), memory_limit is None or memory <= memory_limit)
        for (time, memory), names in places.items()
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
                arrowprops={"arrowstyle": "-", "color": BEYOND_COLOUR, "linewidth": 0.7} if distance > 8 else None,
            )
            text.get_window_extent()  # with the line to its point; moves the text to where it will be
            box = Text.get_window_extent(text)
            if not box.count_overlaps(taken) and frame.contains(*box.min) and frame.contains(*box.max):
                taken.append(box)
                break
            text.remove()
        else:
            axes.annotate(point.label, (point.time, point.memory), fontsize=9)  # over others, but there


def _save(matplotlib: Any, figure: Any, path: str | Path) -> None:
    # Text stays text, and nothing depends on when or where the file was made.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megapipe"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if str(path).endswith(".svg") else None)
