"""Timelines, and schedules against each other, as pages for a browser. Needs plotly, of the extra `viz`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..plan import Plan, Simulation, Span
from ..runtime import RankStep
from .charts import COLOURS, LIMIT_COLOUR, TITLES, WAIT_COLOUR, axis_names, points_of
from .extras import import_extra

__all__ = ["save_comparison_html", "save_html"]

KINDS = {"F": "forward", "BW": "backward", "B": "input gradient", "W": "weight gradient"}


def save_html(plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None) -> None:
    """Save a timeline as one self-contained page: zoom in, and point at an action to see what it waited for.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: a step of each rank, in milliseconds, drawn above the plan on the same scale, with its waits in grey.

    Raises:
        ValueError: plotly is not installed.
    """
    import_extra("plotly")
    from plotly.subplots import make_subplots

    titles = [] if measured is None else list(TITLES)
    num_panels = max(1, len(titles))
    figure = make_subplots(
        num_panels, 1, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.3 / (plan.pp_size + 2)
    )
    if measured is not None:
        for traces in (_wait_bars(measured), _action_bars(plan, [step.spans for step in measured])):
            figure.add_traces(list(traces), rows=1, cols=1)
        figure.update_traces(showlegend=False)
        figure.update_xaxes(title="ms", row=2)
    figure.add_traces(list(_action_bars(plan, simulation.spans)), rows=num_panels, cols=1)
    figure.update_layout(
        title=f"{plan.name}: {plan.pp_size} ranks, {plan.num_microbatches} microbatches"
        + (f", {plan.num_slices} slices" if plan.num_slices > 1 else ""),
        barmode="overlay",
        plot_bgcolor="white",
        dragmode="pan",
        height=160 + (60 + 44 * plan.pp_size) * num_panels,  # pixels
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
    bars: defaultdict[tuple[str, int], list[Bar]] = defaultdict(list)
    for rank, spans in enumerate(ranks):
        before = begin
        for span in spans:
            shade = plan.chunk_of(span.action.stage) % 2
            hover = _explain(plan, rank, span, span.start - before)
            bars[span.action.kind, shade].append(Bar(rank, span.start, span.end, str(span.action), hover))
            before = span.end
    for kind, shade in sorted(bars, key=lambda key: (list(COLOURS).index(key[0]), key[1])):
        name = KINDS[kind] + (" of odd chunks" if shade else "")
        yield _bars(bars[kind, shade], name, COLOURS[kind][shade], 0.8)


def _explain(plan: Plan, rank: int, span: Span, wait: float) -> str:
    """The text that is shown when an action is pointed at."""
    action = span.action
    unit = f"slice {action.slice} of " * (plan.num_slices > 1) + f"microbatch {action.microbatch}"
    lines = [
        f"<b>{action}</b>: {KINDS[action.kind]} of {unit} through stage {action.stage}",
        f"from {span.start:g} to {span.end:g}, after waiting {wait:g}",
    ]
    if plan.has_stage(action.source.stage):
        peer = plan.rank_of(action.source.stage)
        lines.append(f"needs {action.source} of " + ("the same rank" if peer == rank else f"rank {peer}"))
    return "<br>".join(lines)


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


def save_comparison_html(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory_limit: float | None = None, unit: str = ""
) -> None:
    """Save time against memory as a self-contained page with a legend; pointing at a schedule shows its figures.

    Args:
        rows: plans for the same ranks and microbatches, each with its simulation.
        memory_limit: drawn as a line, in microbatches of a whole rank. A schedule beyond it is a cross.
        unit: of the simulations' times.

    Raises:
        ValueError: plotly is not installed.
    """
    import_extra("plotly")
    import plotly.graph_objects as go

    figure = go.Figure()
    for time, memory, label, fits in points_of(rows, memory_limit):
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
    time_name, memory_name = axis_names(unit)
    figure.update_layout(plot_bgcolor="white", height=600, showlegend=True)
    figure.update_xaxes(title=time_name, gridcolor="#eeeeee")
    figure.update_yaxes(title=memory_name, rangemode="tozero", gridcolor="#eeeeee")
    figure.write_html(path, include_plotlyjs=True, config={"displaylogo": False})
