"""`megapipe prove`: whether a schedule is right, on one page."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import platform
from collections.abc import Sequence
from pathlib import Path

import megapipe

from ..plan import Costs, Plan, Settings, Simulation, find_schedule, schedule_names, simulate
from ..proving import ScheduleProof, Size, prove_schedule
from .charts import save_picture, save_standstill
from .command_options import Memory, import_schedule
from .compare_command import PLAIN, all_schedules, front_of
from .progress import doing
from .show_command import show_standstill
from .text import listed, print_legend, print_table, print_timeline, say

ENDINGS = (".md", ".svg", ".png", ".json")


def prove_command(args: argparse.Namespace) -> int:
    """Print the page. Returns 1 where something is wrong."""
    for path in args.save:
        if not path.endswith(ENDINGS):
            raise ValueError(f"--save {path}: the ending is one of {', '.join(ENDINGS)}.")
    name = import_schedule(args.schedule)
    like = None if args.like is None else import_schedule(args.like)
    proof = prove_schedule(name, (args.chunks or [None])[0], like, tell=doing)
    print_page(proof)
    for path in args.save:
        save(proof, path)
    return 0 if proof else 1


def print_page(proof: ScheduleProof) -> None:
    say(f"{proof.name}: {'right' if proof else 'WRONG'}")
    for text in proof.mistakes:
        say(f"mistake    {text}")
    if proof.standstill is not None:
        show_standstill(proof.standstill)
        return
    say(f"on paper   {proof.sizes}")
    say(f"on ranks   {_runs(proof)}")
    say(f"in torch   {_torchs(proof)}")
    if proof.plan is not None:
        _print_plan(proof, proof.plan)
    say(f"made with  {_versions()}")


def _runs(proof: ScheduleProof) -> str:
    if not proof.runs:
        return "not run: it has forwards only, or one rank" if proof.sizes.right else "not run"
    word = "what one process does, to the last bit" if all(proof.runs) else "NOT what one process does"
    return f"two steps compute {word}: {_sizes(proof.ran)}. In the last these are {proof.runs[-1].counts}"


def _torchs(proof: ScheduleProof) -> str:
    if proof.not_by_torch:
        return f"not run: {proof.not_by_torch}"
    if not proof.torchs:
        return "not run"
    word = "the same, to the last bit" if all(proof.torchs) else "NOT the same"
    last = {size.pp_size: size for size in proof.ran}
    return f"{word}, by torch's _PipelineScheduleRuntime from the plan's CSV: {_sizes([*last.values()])}"


def _sizes(sizes: Sequence[Size]) -> str:
    """`3 and 4 microbatches on 2 ranks`, and so on."""
    by_ranks: dict[int, list[str]] = {}
    for size in sizes:
        cut = f" in {size.num_slices} slices" if size.num_slices > 1 else ""
        by_ranks.setdefault(size.pp_size, []).append(f"{size.num_microbatches}{cut}")
    return ", ".join(f"{' and '.join(of)} microbatches on {pp_size} ranks" for pp_size, of in by_ranks.items())


def _print_plan(proof: ScheduleProof, plan: Plan) -> None:
    simulation = simulate(plan, Costs())
    say(f"drawn      {plan.num_microbatches} microbatches on {plan.pp_size} ranks")
    print_legend(plan, print_timeline(plan, simulation.spans, None, simulation.makespan))
    say(f"bubble     {listed(simulation.bubble, '.1%')} (F, B and W take equally long)")
    if not plan.forward_only:
        measured = f"; measured in bytes: {listed(proof.held, '.1f')}" if proof.held else ""
        say(f"held       {listed(simulation.peak_activations, 'g')} (microbatches at once){measured}")
    if plan.pp_size > 1 and not plan.forward_only:
        _print_beside(proof, plan, simulation)


def _print_beside(proof: ScheduleProof, plan: Plan, simulation: Simulation) -> None:
    """A table of this schedule, 1F1B, and those that no other beats."""
    sizes = (plan.pp_size, plan.num_microbatches)
    names = [name for name in schedule_names() if name != plan.name and find_schedule(name).sizes is None]
    with contextlib.redirect_stdout(io.StringIO()):  # what does not run at this size
        others = all_schedules(names, *sizes, [None], Costs(), [1], Settings())
    rows = sorted([(plan, simulation), *others], key=lambda row: (row[1].makespan, max(row[1].peak_activations)))
    beaten = front_of(rows, Memory())
    shown = [(*row, by) for row, by in zip(rows, beaten) if by is None or row[0] is plan or row[0].name == PLAIN]
    columns = {
        "schedule": [f"{row.name}{' (this)' * (row is plan)}" for row, _, _ in shown],
        "step": [f"{one.makespan:.4g}" for _, one, _ in shown],
        "bubble": [f"{max(one.bubble):.1%}" for _, one, _ in shown],
        "held": [f"{max(one.peak_activations):.3g}" for _, one, _ in shown],
        "messages": [str(row.num_messages) for row, _, _ in shown],
    }
    print_table(columns, ("schedule",), ("messages",))
    own = simulation.makespan * (1 + 1e-9), max(simulation.peak_activations)
    better = [
        (row.splits_backward, max(one.peak_activations), row.name, one)
        for row, one in rows
        if row is not plan and one.makespan <= own[0] and max(one.peak_activations) <= own[1]
    ]
    if better and next(by for row, _, by in shown if row is plan) is not None:
        _, _, name, other = min(better, key=lambda one: one[:2])
        say(f"beaten     {_beaten(plan, simulation, name, other)}")


def _beaten(plan: Plan, own: Simulation, by: str, other: Simulation) -> str:
    held, least = max(own.peak_activations), max(other.peak_activations)
    times = held / least
    much = "twice the memory: " if 1.9 < times < 2.1 else f"{times:.2g} times the memory: " if times > 1.05 else ""
    step = "the same step" if abs(own.makespan / other.makespan - 1) < 1e-9 else f"a step of {other.makespan:.4g}"
    return f"{much}{plan.name} holds {held:.3g} microbatches at once, and {by} {least:.3g} in {step}"


def _versions() -> str:
    import torch

    return f"megapipe {megapipe.__version__}, torch {torch.__version__}, Python {platform.python_version()}"


def page_of(proof: ScheduleProof, picture: str = "") -> str:
    """The page as Markdown.

    Args:
        picture: the file of one, which is shown.
    """
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        print_page(proof)
    shown = f"![The schedule {proof.name}]({picture})\n\n" if picture else ""
    return f"# {proof.name}\n\n{shown}```\n{text.getvalue()}```\n"


def save(proof: ScheduleProof, path: str) -> None:
    if path.endswith(".json"):
        Path(path).write_text(json.dumps(proof.as_json(), indent=1) + "\n")
    elif path.endswith(".md"):
        picture = Path(path).with_suffix(".svg")
        save(proof, str(picture))
        Path(path).write_text(page_of(proof, picture.name))
    elif proof.standstill is not None:
        save_standstill(proof.standstill, path)
    elif proof.plan is not None:
        save_picture(proof.plan, simulate(proof.plan, Costs()), path)
