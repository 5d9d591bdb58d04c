"""A simulated plan drawn for documents and for the browser. Needs the extra `viz`: matplotlib and plotly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .plan import Plan
from .simulation import Simulation, Span

__all__ = ["save_html", "save_picture"]

# Per kind of action, the colours of even and odd chunks.
COLOURS = {
    "F": ("#8fb8e8", "#3f74b5"),
    "BW": ("#a6d49f", "#4c9a52"),
    "B": ("#a6d49f", "#4c9a52"),
    "W": ("#f3d58c", "#c9973a"),
}


KINDS = {"F": "forward", "BW": "backward", "B": "input gradient", "W": "weight gradient"}


def save_picture(plan: Plan, simulation: Simulation, path: str | Path) -> None:
    """The timeline as .svg or .png, by the ending of `path`: a row per rank, each action with its microbatch."""
    matplotlib = _needed("matplotlib")
    from matplotlib.figure import Figure

    columns = simulation.makespan / min(span.end - span.start for spans in simulation.spans for span in spans)
    figure = Figure(figsize=(max(6.0, min(40.0, 0.3 * columns)), 0.5 + 0.42 * plan.pp_size), layout="constrained")
    axes = figure.subplots()
    for rank, spans in enumerate(simulation.spans):
        for action, start, end in spans:
            colour = COLOURS[action.kind][plan.chunk_of(action.stage) % 2]
            axes.barh(rank, end - start, left=start, height=0.92, color=colour, edgecolor="white", linewidth=0.8)
            axes.text((start + end) / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=8)
    axes.set_yticks(range(plan.pp_size), [f"rank {rank}" for rank in range(plan.pp_size)])
    axes.set_ylim(plan.pp_size - 0.5, -0.5)
    axes.set_xlim(min(spans[0].start for spans in simulation.spans), max(spans[-1].end for spans in simulation.spans))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    # Text stays text, and nothing depends on when or where the file was made.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "megapipe"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if str(path).endswith(".svg") else None)


def save_html(plan: Plan, simulation: Simulation, path: str | Path) -> None:
    """The timeline as one self-contained page: zoom in, and point at an action to see what it waited for."""
    _needed("plotly")
    import plotly.graph_objects as go

    figure = go.Figure()
    for kind, name in KINDS.items():
        for shade in (0, 1):
            rows: list[tuple[int, Span, str]] = []
            for rank, spans in enumerate(simulation.spans):
                for index, span in enumerate(spans):
                    if span.action.kind == kind and plan.chunk_of(span.action.stage) % 2 == shade:
                        before = spans[index - 1].end if index else simulation.spans[0][0].start
                        rows.append((rank, span, _explain(plan, rank, span, span.start - before)))
            if rows:
                figure.add_bar(
                    name=name + (" of odd chunks" if shade else ""),
                    orientation="h",
                    y=[f"rank {rank}" for rank, _, _ in rows],
                    base=[span.start for _, span, _ in rows],
                    x=[span.end - span.start for _, span, _ in rows],
                    text=[str(span.action) for _, span, _ in rows],
                    textposition="inside",
                    textangle=0,
                    insidetextanchor="middle",
                    hovertext=[text for _, _, text in rows],
                    hoverinfo="text",
                    marker={"color": COLOURS[kind][shade], "line": {"color": "white", "width": 1}},
                )
    figure.update_layout(
        title=f"{plan.name}: {plan.pp_size} ranks, {plan.num_microbatches} microbatches",
        barmode="overlay",
        plot_bgcolor="white",
        dragmode="pan",
        height=160 + 44 * plan.pp_size,
        yaxis={"autorange": "reversed", "categoryarray": [f"rank {rank}" for rank in range(plan.pp_size)]},
    )
    figure.write_html(path, include_plotlyjs=True, config={"scrollZoom": True, "displaylogo": False})


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


def _needed(package: str) -> Any:
    try:
        return __import__(package)
    except ImportError:
        raise ValueError(f"drawing this needs {package}: pip install 'megapipe[viz]'.") from None
