"""Timelines, and schedules against each other, as pages for a browser that hold all that they need."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plan import KINDS, Plan, RankStep, Simulation, Span
from .cells import Held, held_as_measured, held_by_plan, levels_in_bytes
from .charts import TITLES, svg_of
from .comparison import draw_comparison, time_axis
from .memory import MICROBATCHES, Memory
from .palette import DARK, LIGHT, Scheme, ink_on

__all__ = ["compact", "look", "page_of", "save_comparison_html", "save_html"]

HERE = Path(__file__).parent


def save_html(plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[RankStep] | None = None) -> None:
    """Save a timeline as one self-contained page: zoom in, and point at an action to see what it waited for.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: a step of each rank, in milliseconds, drawn above the plan on the same scale, with its waits in grey.
    """
    panels = [_panel(plan, simulation.spans, held_by_plan(simulation))]
    if measured is not None:
        above = _panel(plan, [step.spans for step in measured], held_as_measured(measured))
        above["waits"] = list(map(_waits, measured))
        panels.insert(0, above)
        for panel, title in zip(panels, TITLES):
            panel["title"] = title
    data = {
        **look(),
        "unit": "" if measured is None else "ms",
        "begin": min(row[0][4] for panel in panels for row in panel["rows"]),
        "end": max(row[-1][5] for panel in panels for row in panel["rows"]),
        "ranks": [plan.rank_of(stage) for stage in range(plan.pp_size * plan.num_chunks)],
        "numSlices": plan.num_slices,
        "panels": panels,
    }
    slices = f", {plan.num_slices} slices" if plan.num_slices > 1 else ""
    title = f"{plan.name}: {plan.pp_size} ranks, {plan.num_microbatches} microbatches{slices}"
    hint = "The wheel zooms, dragging moves, a double click shows all again. Point at an action for what it waited for."
    body = f"<h1>{html.escape(title)}</h1>\n<p>{hint}</p>\n<div id='legend'></div>\n<div id='timeline'></div>"
    script = (
        f"const data = {compact(data)};\n"
        "drawLegend(document.getElementById('legend'), data);\ndrawTimeline(document.getElementById('timeline'), data);"
    )
    Path(path).write_text(page_of(title, body, script))


def _panel(plan: Plan, ranks: Sequence[Sequence[Span]], memory: Sequence[Held] | None) -> dict[str, Any]:
    bytes_ = {}
    if memory is not None:
        bytes_["bytes"] = [[[*map(_short, level)] for level in row] for row in levels_in_bytes(ranks, memory)]
    repeats = [range(0, len(spans), len(actions)) for spans, actions in zip(ranks, plan.actions)]
    return {
        "title": "",
        "rows": [[[*_place(span)] for span in spans] for spans in ranks],
        "pairs": [[step + at for step in steps for at in pairs] for steps, pairs in zip(repeats, plan.program.pairs)],
        **bytes_,
    }


def _place(span: Span) -> tuple[Any, ...]:
    action, start, end = span
    return action.stage, action.kind, action.microbatch, action.slice, _short(start), _short(end)


def _waits(step: RankStep) -> list[tuple[str, float, float]]:
    waits = []
    for action, start, end in step.waits:
        what = "the last messages to be taken" if action is None else f"what {action} needs"
        waits.append((f"waits {end - start:.4g} ms for {what}", _short(start), _short(end)))
    return waits


def _short(time: float) -> float:
    return float(f"{time:.8g}")


def look() -> dict[str, Any]:
    """The kinds of action, as page.js draws them."""
    # The letter, and of which stage it is needed, counted from this one.
    needed = {kind.message: (kind.name[0], -1 if kind.is_forward else 1) for kind in KINDS.values() if kind.message}
    kinds = {
        name: {
            "label": kind.label,
            "colours": kind.colours,
            "inks": list(map(ink_on, kind.colours)),
            "needs": needed.get(kind.message or "") or ((kind.after or "")[0], 0),
            "held": kind.held,
        }
        for name, kind in KINDS.items()
    }
    return {"kinds": kinds}


def compact(data: Any) -> str:
    """JSON that may stand in a script."""
    return json.dumps(data, separators=(",", ":")).replace("</", "<\\/")


def page_of(title: str, body: str, script: str = "") -> str:
    """A page in the style of all, with the functions of page.js for its script. It loads nothing."""
    style = (HERE / "page.css").read_text()
    for name, scheme in (("LIGHT", LIGHT), ("DARK", DARK)):
        style = style.replace(name, _variables(scheme))
    functions = (HERE / "page.js").read_text() if script else ""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n<title>{html.escape(title)}</title>\n'
        f"<style>\n{style}</style>\n{body}\n<script>\n{functions}{script}\n</script>\n</html>\n"
    )


def _variables(scheme: Scheme) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in scheme._asdict().items())


def save_comparison_html(
    rows: Sequence[tuple[Plan, Simulation]], path: str | Path, memory: Memory = MICROBATCHES, unit: str = ""
) -> None:
    """Save time against memory as a self-contained page: a chart, and a table of its figures.

    Args:
        rows: plans for the same ranks and microbatches, each with its simulation.
        memory: what is counted of it. A limit is drawn as a line; a schedule beyond it is grey.
        unit: of the simulations' times.

    Raises:
        ValueError: matplotlib is not installed.
    """
    names = ("schedule", "chunks", "slices", time_axis(unit), memory.name, "messages per step")
    lines = ["".join(f"<th>{name}</th>" for name in names)]
    for plan, simulation in rows:
        figures = (plan.num_chunks, plan.num_slices, f"{simulation.makespan:.4g}")
        cells = (plan.name, *figures, memory.in_words(memory.of(simulation)), plan.num_messages)
        lines.append("".join(f"<td>{cell}</td>" for cell in cells))
    plan, _ = rows[0]
    title = f"Schedules for {plan.pp_size} ranks and {plan.num_microbatches} microbatches"
    chart = svg_of(draw_comparison(rows, memory, unit))
    table = "\n".join(f"<tr>{line}</tr>" for line in lines)
    body = f"<h1>{title}</h1>\n{chart[chart.index('<svg') :]}\n<table>\n{table}\n</table>"
    Path(path).write_text(page_of(title, body))
