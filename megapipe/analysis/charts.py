"""Timelines drawn for documents. Needs matplotlib, of the extra `viz`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..plan import KINDS, Action, Plan, RankStep, Simulation, Span, Standstill
from .text import bytes_in_words
from .timeline_cells import (
    DARK,
    LIGHT,
    Level,
    cells_of,
    held_by_plan,
    ink_on,
    kinds_in,
    levels_in_bytes,
    levels_of,
    shade_of,
)

TITLES = ("measured: waits for messages in grey, the host in white", "by the plan")

COLUMN, ROW = 0.22, 0.55
"""Inches of a short action, and of a rank."""

MOST_COLUMNS = 112
"""How many short actions a picture has room for: where there are more, all are narrower, and short ones unnamed."""

STANDS = "#c4001d"
"""The colour of what does not go on."""

CELL, LEVEL = 0.66, 0.24
"""The heights of the actions and, below them, of the microbatches held, as shares of a rank's row."""


def save_picture(
    plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None
) -> None:
    """Save a timeline as .svg or .png, by the ending of `path`: a row per rank, each action with its microbatch, and
    below them how many bytes the rank holds, or microbatches where bytes are not known.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: a step of each rank, in milliseconds, drawn above the plan on the same scale, with its waits in grey.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure_of_size = _figures()
    panels: list[Sequence[Sequence[Span]]] = [simulation.spans]
    held = [held_by_plan(simulation)]
    if measured is not None:
        panels.insert(0, [step.spans for step in measured])
        held.insert(0, None)
    begin = min(spans[0].start for ranks in panels for spans in ranks)
    end = max(spans[-1].end for ranks in panels for spans in ranks)
    columns = (end - begin) / _usual_length(simulation.spans)
    shortest = 0.7 * (end - begin) / MOST_COLUMNS if columns > MOST_COLUMNS else 0.0  # of those that have a name
    columns = min(MOST_COLUMNS, columns)
    figure = figure_of_size(columns, len(panels) * plan.pp_size, len(panels))
    grid = figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0]
    for axes, ranks, memory, title in zip(grid, panels, held, TITLES):
        _draw_timeline(axes, plan, ranks, shortest)
        if memory is not None:
            _draw_levels(axes, levels_in_bytes(ranks, memory), bytes_in_words)
        elif not plan.forward_only:
            _draw_levels(axes, levels_of(plan, ranks), "{:g}".format)
        axes.set_xlim(begin, end)
        if measured is not None:
            axes.set_title(title, loc="left", fontsize=9, color=LIGHT.text)
    if measured is not None:
        _draw_waits(grid[0], measured)
        grid[-1].set_xlabel("ms", color=LIGHT.text)
    _draw_legend(figure, plan, "bytes" if any(held) else "microbatches")
    _save(figure, path)


def save_standstill(standstill: Standstill, path: str | Path) -> None:
    """Save a step as far as it goes: as `save_picture`, with an outline where a rank waits for ever, or stops.

    Raises:
        ValueError: matplotlib is not installed.
    """
    from matplotlib.patches import Rectangle

    plan, figure_of_size = standstill.plan, _figures()
    length = _usual_length(standstill.spans)
    end = standstill.end + length
    figure = figure_of_size(min(MOST_COLUMNS, end / length), plan.pp_size, 1)
    axes = figure.subplots()
    _draw_timeline(axes, plan, standstill.spans, 0.0)
    axes.set_xlim(0.0, end)
    for rank, (action, reason) in enumerate(zip(standstill.stands_at, standstill.reasons)):
        if reason:
            begin = standstill.spans[rank][-1].end if standstill.spans[rank] else 0.0
            place = (begin, rank - 0.5), length, CELL
            axes.add_patch(Rectangle(*place, fill=False, edgecolor=STANDS, linewidth=1.4, linestyle="--"))
            axes.text(
                begin + length / 2, rank - 0.5 + CELL / 2, "!" if action is None else f"{action.kind[0]}{action.unit}?",
                ha="center", va="center_baseline", fontsize=8, color=STANDS,
            )  # fmt: skip
    _draw_legend(figure, plan, "")
    _save(figure, path)


def _figures() -> Callable[[float, int, int], Any]:
    """Makes a figure for so many short actions, ranks and panels. Raises ValueError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("a picture needs matplotlib: pip install 'megapipe[viz]'.") from None

    def figure_of_size(columns: float, num_rows: int, num_panels: int) -> Any:
        size = (max(6.0, COLUMN * columns + 1.2), 0.6 + 0.35 * num_panels + ROW * num_rows)
        return Figure(figsize=size, layout="constrained", facecolor=LIGHT.page)

    return figure_of_size


def _save(figure: Any, path: str | Path) -> None:
    if str(path).endswith(".svg"):
        Path(path).write_text(_svg_of(figure))
    else:
        figure.savefig(path, dpi=120)


def _draw_timeline(axes: Any, plan: Plan, ranks: Sequence[Sequence[Span]], shortest: float) -> None:
    for rank, cells in enumerate(cells_of(plan, ranks)):
        for cell in cells:
            height = CELL / len(cell.actions)
            for index, action in enumerate(cell.actions):  # a pair: F above B
                place = (cell.start, rank - 0.5 + index * height), cell.end - cell.start, height
                _draw_action(axes, plan, action, place, is_named=cell.end - cell.start >= shortest)
    names = [f"rank {rank}" for rank in range(plan.pp_size)]
    axes.set_yticks([rank - 0.5 + CELL / 2 for rank in range(plan.pp_size)], names)
    axes.set_ylim(plan.pp_size - 0.5, -0.5)
    axes.tick_params(length=0, colors=LIGHT.text)
    axes.set_facecolor(LIGHT.page)
    for side in axes.spines.values():
        side.set_visible(False)


def _draw_action(
    axes: Any, plan: Plan, action: Action, place: tuple[tuple[float, float], float, float], is_named: bool
) -> None:
    from matplotlib.patches import Rectangle

    colour = shade_of(KINDS[action.kind], plan.chunk_of(action.stage), plan.num_chunks)
    axes.add_patch(Rectangle(*place, facecolor=colour, edgecolor=LIGHT.page, linewidth=0.8))
    (left, top), width, height = place
    if is_named:
        axes.text(
            left + width / 2, top + height / 2, action.unit, ha="center", va="center_baseline",
            fontsize=8 if len(action.unit) < 4 else 6.5, color=ink_on(colour), clip_on=True,
        )  # fmt: skip


def _draw_levels(axes: Any, rows: Sequence[Sequence[Level]], in_words: Callable[[float], str]) -> None:
    """What each rank holds over time, below its actions, and the most of it at the right."""
    most = max(level.held for row in rows for level in row)
    for rank, row in enumerate(rows):
        if not row:  # nothing takes any time there
            continue
        base = rank + 0.45
        edges = [row[0].start, *(level.end for level in row)]
        tops = [base - LEVEL * level.held / most for level in row]
        axes.stairs(tops, edges, baseline=base, fill=True, color=LIGHT.faint)
        axes.annotate(
            in_words(max(level.held for level in row)),
            (1, base),
            (4, 0),
            axes.get_yaxis_transform(),
            "offset points",
            color=LIGHT.text,
            fontsize=8,
        )


def _draw_waits(axes: Any, measured: Sequence[RankStep]) -> None:
    for rank, step in enumerate(measured):
        for _, start, end in step.waits:
            axes.barh(rank - 0.5 + CELL / 2, end - start, left=start, height=CELL / 2, color=LIGHT.wait)


def _draw_legend(figure: Any, plan: Plan, held: str) -> None:
    """
    Args:
        held: what is drawn of it below the actions; "" for a step that does not come to its end.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.patches import Patch

    def patches(*colours: str) -> tuple[Any, ...]:
        return tuple(Patch(color=colour) for colour in colours)

    num, chunks = plan.num_chunks, range(plan.num_chunks)
    entries = {kind.label: patches(*(shade_of(kind, chunk, num) for chunk in chunks)) for kind in kinds_in(plan)}
    if any(plan.program.pairs):
        entries["F above B: overlapped pair"] = patches(
            *{kind.direction: kind.colours[0] for kind in kinds_in(plan) if kind.direction}.values()
        )
    if held and not plan.forward_only:
        entries[f"{held} held, with the most at the right"] = patches(LIGHT.faint)
    if plan.num_chunks > 1:
        entries["dark: odd chunks" if num == 2 else "the darker, the later the chunk"] = patches("none")
    if not held:
        entries["waits for ever (!: an error)"] = (Patch(fill=False, edgecolor=STANDS, linestyle="--"),)
    figure.legend(
        list(entries.values()), list(entries), loc="outside upper left", ncols=len(entries), frameon=False, fontsize=8,
        labelcolor=LIGHT.text, handler_map={tuple: HandlerTuple(ndivide=None)}, columnspacing=1.2, handlelength=1.6,
    )  # fmt: skip


def _usual_length(ranks: Sequence[Sequence[Span]]) -> float:
    """The time of a short action, longer than one in twenty. The width of a picture follows from it."""
    lengths = sorted(end - start for spans in ranks for _, start, end in spans if end > start)
    return lengths[len(lengths) // 20] if lengths else 1.0


def _svg_of(figure: Any) -> str:
    """The figure as an SVG, dark where dark pages are preferred, and the same whenever and wherever it is made."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megapipe"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    rules = "".join(
        f'[style*="{what}: {light}"] {{ {what}: {dark} !important }} '
        for light, dark in zip(LIGHT, DARK)
        for what in ("fill", "stroke")
    )
    style = f"<style>@media (prefers-color-scheme: dark) {{ {rules}}}</style>\n</svg>"
    return text.getvalue().replace("</svg>", style)
