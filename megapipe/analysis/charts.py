"""Timelines, and schedules against each other, drawn for documents and for the browser. Needs the extra `viz`:
matplotlib and plotly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import Plan, Simulation, Span
from ..runtime import RankStep

__all__ = ["save_comparison", "save_comparison_html", "save_html", "save_picture"]

# Per kind of action, the colours of even and odd chunks.
COLOURS = {
    "F": ("#8fb8e8", "#3f74b5"),
    "BW": ("#a6d49f", "#4c9a52"),
    "B": ("#a6d49f", "#4c9a52"),
    "W": ("#f3d58c", "#c9973a"),
}
KINDS = {"F": "forward", "BW": "backward", "B": "input gradient", "W": "weight gradient"}
WAIT_COLOUR = "#e9e9e9"
TITLES = ("measured: waits for messages in grey, the host in white", "by the plan")
LIMIT_COLOUR = "#c0504d"
BEYOND_COLOUR = "#b0b0b0"


# Timelines


def save_picture(
    plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None
) -> None:
    """The timeline as .svg or .png, by the ending of `path`: a row per rank, each action with its microbatch.

    Args:
        measured: a step of each rank, drawn above the plan on the same scale, with its waits in grey.
    """
    matplotlib = _needed("matplotlib")
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
            axes.text(
                (start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=8, clip_on=True
            )
    axes.set_yticks(range(plan.pp_size), [f"rank {rank}" for rank in range(plan.pp_size)])
    axes.set_ylim(plan.pp_size - 0.5, -0.5)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def save_html(plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None) -> None:
    """The timeline as one self-contained page: zoom in, and point at an action to see what it waited for.

    Args:
        measured: a step of each rank, drawn above the plan on the same scale, with its waits in grey.
    """
    _needed("plotly")
    from plotly.subplots import make_subplots

    titles = [] if measured is None else list(TITLES)
    figure = make_subplots(
        max(1, len(titles)), 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.3 / (plan.pp_size + 2)
    )
    if measured is not None:
        for traces in (_wait_bars(measured), _action_bars(plan, [step.spans for step in measured])):
            figure.add_traces(list(traces), rows=1, cols=1)
        figure.update_traces(showlegend=False)
        figure.update_xaxes(title="ms", row=2)
    figure.add_traces(list(_action_bars(plan, simulation.spans)), rows=max(1, len(titles)), cols=1)
    figure.update_layout(
        title=f"{plan.name}: {plan.pp_size} ranks, {plan.num_microbatches} microbatches",
        barmode="overlay",
        plot_bgcolor="white",
        dragmode="pan",
        height=160 + (60 + 44 * plan.pp_size) * max(1, len(titles)),
    )
    figure.update_yaxes(autorange="reversed", categoryarray=[f"rank {rank}" for rank in range(plan.pp_size)])
    figure.write_html(path, include_plotlyjs=True, config={"scrollZoom": True, "displaylogo": False})


class Bar(NamedTuple):
    rank: int
    start: float
    end: float
    label: str
    hover: str


def _action_bars(plan: Plan, ranks: Sequence[Sequence[Span]]) -> Iterator[Any]:
    """A plotly trace for each kind of action and shade."""
    begin = min(spans[0].start for spans in ranks)
    bars: dict[tuple[str, int], list[Bar]] = {(kind, shade): [] for kind in COLOURS for shade in (0, 1)}
    for rank, spans in enumerate(ranks):
        before = begin
        for span in spans:
            action, start, end = span
            hover = _explain(plan, rank, span, start - before)
            shade = plan.chunk_of(action.stage) % 2
            bars[action.kind, shade].append(Bar(rank, start, end, str(action), hover))
            before = end
    for (kind, shade), own in bars.items():
        if own:
            yield _bars(own, KINDS[kind] + (" of odd chunks" if shade else ""), COLOURS[kind][shade], 0.8)


def _wait_bars(ranks: Sequence[RankStep]) -> Iterator[Any]:
    bars = []
    for rank, step in enumerate(ranks):
        for action, start, end in step.waits:
            what = "the last messages to be taken" if action is None else f"what {action} needs"
            bars.append(Bar(rank, start, end, "", f"waits {end - start:.4g} for {what}"))
    yield _bars(bars, "wait", WAIT_COLOUR, 0.45)


def _bars(bars: Sequence[Bar], name: str, colour: str, width: float) -> Any:
    import plotly.graph_objects as go

    return go.Bar(
        name=name,
        orientation="h",
        y=[f"rank {bar.rank}" for bar in bars],
        base=[bar.start for bar in bars],
        x=[bar.end - bar.start for bar in bars],
        width=width,
        text=[bar.label for bar in bars],
        textposition="inside",
        textangle=0,
        insidetextanchor="middle",
        hovertext=[bar.hover for bar in bars],
        hoverinfo="text",
        marker={"color": colour, "line": {"color": "white", "width": 1}},
    )


def _explain(plan: Plan, rank: int, span: Span, wait: float) -> str:
    """What is shown when an action is pointed at."""
    action = span.action
    lines = [
        f"<b>{action}</b>: {KINDS[action.kind]} of microbatch {action.microbatch} through stage {action.stage}",
        f"from {span.start:g} to {span.end:g}, after waiting {wait:g}",
    ]
    if plan.has_stage(action.source.stage):
        peer = plan.rank_of(action.source.stage)
        lines.append(f"needs {action.source} of " + ("the same rank" if peer == rank else f"rank {peer}"))
    return "<br>".join(lines)


def _usual_length(ranks: Sequence[Sequence[Span]]) -> float:
    """That of a short action: what the width of a picture goes by."""
    lengths = sorted(span.end - span.start for spans in ranks for span in spans)
    return lengths[len(lengths) // 20]


# Schedules against each other


class Point(NamedTuple):
    """Schedules that take the same time and memory."""

    time: float
    memory: float
    label: str
    fits: bool


def save_comparison(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory_limit: float | None = None, unit: str = ""
) -> None:
    """Time against memory as .svg or .png, by the ending of `path`: a point per schedule.

    Args:
        rows: plans for the same ranks and microbatches, with what they take.
        memory_limit: drawn as a line; what is beyond it is grey. In microbatches of a whole rank.
    """
    matplotlib = _needed("matplotlib")
    from matplotlib.figure import Figure

    points = _points(rows, memory_limit)
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
    time, memory = _axis_names(unit)
    axes.set_xlabel(time)
    axes.set_ylabel(memory)
    axes.grid(color="#eeeeee", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    _place_labels(figure, axes, points, memory_limit)
    _save(matplotlib, figure, path)


def save_comparison_html(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory_limit: float | None = None, unit: str = ""
) -> None:
    """The same as a self-contained page, with a legend; pointing at a schedule shows its figures. What does not fit is
    a cross."""
    _needed("plotly")
    import plotly.graph_objects as go

    figure = go.Figure()
    for time, memory, label, fits in _points(rows, memory_limit):
        figure.add_scatter(
            name=label,
            mode="markers",
            x=[time],
            y=[memory],
            hovertext=f"<b>{label}</b><br>step {time:.4g} {unit}<br>{memory:.3g} microbatches held",
            hoverinfo="text",
            marker={"size": 12, "symbol": "circle" if fits else "x"},
        )
    if memory_limit is not None:
        line = {"color": LIMIT_COLOUR, "dash": "dash"}
        figure.add_hline(memory_limit, line=line, annotation_text=f"limit {memory_limit:g}")
    time_name, memory_name = _axis_names(unit)
    figure.update_layout(
        plot_bgcolor="white", height=600, showlegend=True, xaxis_title=time_name, yaxis_title=memory_name
    )
    figure.update_xaxes(gridcolor="#eeeeee")
    figure.update_yaxes(rangemode="tozero", gridcolor="#eeeeee")
    figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False})


def _axis_names(unit: str) -> tuple[str, str]:
    return "time of a step" + (f", {unit}" if unit else ""), "microbatches held on the fullest rank"


def _points(rows: Iterable[tuple[Plan, Simulation]], memory_limit: float | None) -> list[Point]:
    places: dict[tuple[float, float], list[str]] = {}
    for plan, simulation in rows:
        place = round(simulation.makespan, 9), round(max(simulation.peak_activations), 9)
        several = plan.num_chunks > 1
        places.setdefault(place, []).append(f"{plan.name} x{plan.num_chunks}" if several else plan.name)
    return [
        Point(time, memory, ", ".join(names), memory_limit is None or memory <= memory_limit)
        for (time, memory), names in places.items()
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


# Directions and distance from a point, the best first.
LABEL_PLACES = [
    (right, up, distance)
    for distance in (8, 16, 28, 42, 60, 80)
    for right, up in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
]


def _save(matplotlib: Any, figure: Any, path: str | Path) -> None:
    # Text stays text, and nothing depends on when or where the file was made.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megapipe"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if str(path).endswith(".svg") else None)


def _needed(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        raise ValueError(f"drawing this needs {package}: pip install 'megapipe[viz]'.") from None
