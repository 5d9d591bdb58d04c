"""`megapipe show`: one schedule, or a measured step above its plan."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ...plan import Plan, Simulation, find_schedule, load_plan, schedule_names, simulate
from ..bubble import split_bubble
from ..cells import held_as_measured, held_by_plan
from ..charts import save_picture
from ..memory import bytes_in_words
from ..pages import save_html
from ..text import Form
from ..timeline import Timeline, load_timeline
from ..trace import save_trace
from .options import (
    add_bytes,
    add_costs,
    add_pictures,
    add_settings,
    add_sizes,
    check_size,
    check_time,
    costs_of,
    record_plan,
    settings_of,
)
from .terminal import listed, print_hint, print_legend, print_timeline, say

__all__ = ["add_show"]


def add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="draw one schedule", description="Draw a schedule's timeline.")
    files = "a file saved with --csv or --json, or a measured timeline"
    show.add_argument("schedule", help=f"{', '.join(schedule_names())}, {files}")
    add_sizes(show, required=False)
    add_settings(show)
    add_costs(show)
    add_bytes(show)
    show.add_argument(
        "--steps", type=int, default=1, metavar="N", help="training steps, one after the other without a barrier"
    )
    show.add_argument("--comms", action="store_true", help="list what each rank does, messages included")
    show.add_argument("--width", type=int, metavar="N", help="columns of the timeline; default: the terminal's")
    show.add_argument("--csv", metavar="FILE", help="save the actions, a row per rank")
    show.add_argument("--json", metavar="FILE", help="save the actions")
    add_pictures(show, "the timeline")
    show.add_argument("--trace", metavar="FILE", help="save the timeline as a trace that Perfetto opens")
    show.set_defaults(run=_show)


def _show(args: argparse.Namespace) -> None:
    measured = load_timeline(args.schedule) if args.schedule.endswith(".json") else None
    if measured is not None and args.unsplit:
        raise ValueError("--unsplit is for plans: a measured timeline shows what its layers did. See megapipe tune.")
    plan = _find_plan(args) if measured is None else measured.plan
    plan.check()
    check_size(*plan.sizes.values(), args.steps)
    simulation = simulate(plan, costs_of(args), args.steps) if measured is None else measured.predict()
    check_time(simulation)
    _save_files(plan, simulation, measured, args)
    if measured is None:
        spans = simulation.spans
        used = print_timeline(plan, spans, args.width, simulation.makespan, held_by_plan(simulation))
    else:
        used = _print_both(measured, simulation, args.width)
    print_legend(plan, used)
    if args.comms:
        for rank, events in enumerate(plan.events):
            shown = [str(event) for event in events if event.action is not None or plan.peer(rank, event) is not None]
            say(f"rank {rank}: " + " ".join(shown))
    if measured is None:
        _print_figures(plan, simulation, args.forward)
    else:
        _print_measured(measured, simulation)


def _save_files(plan: Plan, simulation: Simulation, measured: Timeline | None, args: argparse.Namespace) -> None:
    step = None if measured is None else measured.typical_step
    if args.csv:
        plan.save_csv(args.csv)
    if args.json:
        plan.save_json(args.json)
    for picture in (args.svg, args.png):
        if picture:
            save_picture(plan, simulation, picture, step)
    if args.html:
        save_html(plan, simulation, args.html, step)
    if args.trace:
        save_trace(plan, simulation, args.trace, measured=[] if measured is None else measured.steps)


def _find_plan(args: argparse.Namespace) -> Plan:
    if args.schedule.endswith((".csv", ".json")):
        return load_plan(args.schedule)
    find_schedule(args.schedule)  # an unknown name is the first thing to complain about
    if args.pp is None or args.microbatches is None:
        raise ValueError("--pp and --microbatches are needed, unless the schedule is a file.")
    sizes = (args.pp, args.microbatches, args.chunks, args.slices)
    return record_plan(args.schedule, *sizes, settings_of(args), costs_of(args))


def _print_both(measured: Timeline, simulation: Simulation, width: int | None) -> list[Form]:
    """The measured step and its plan, on the same scale."""
    spans = [rank.spans for rank in measured.typical_step]
    duration = max(rank.end for rank in measured.typical_step)
    print(f"measured, the median of {len(measured.steps)} steps:")
    memory = held_as_measured(measured.typical_step)
    used = print_timeline(measured.plan, spans, width, max(duration, simulation.makespan), memory)
    print("by the plan, with the mean times that were measured:")
    print_timeline(measured.plan, simulation.spans, width, max(duration, simulation.makespan))
    return used


def _print_figures(plan: Plan, simulation: Simulation, forward: float) -> None:
    bound = f"at least {simulation.lower_bound:g} in any order"
    say(f"step       {simulation.step_time:g}, {bound} (F of a microbatch on a whole rank takes {forward:g})")
    say(f"bubble     {listed(simulation.bubble, '.1%')} (share of the step without work)")
    say(f"in a span  {listed(simulation.inner_bubble, '.1%')} (from a rank's first action to its last)")
    if not plan.forward_only:
        share = f", a chunk's counted as 1/{plan.num_chunks}" if plan.num_chunks > 1 else ""
        share += f", a slice as 1/{plan.num_slices}" if plan.num_slices > 1 else ""
        say(f"held       {listed(simulation.peak_activations, 'g')} (microbatches at once{share})")
    if simulation.memory:
        fullest = max(simulation.memory, key=lambda rank: rank.peak)
        parts = " + ".join(f"{bytes_in_words(number)} {name}" for name, number in fullest.parts.items())
        say(f"bytes      {_bytes(simulation.peak_bytes)} (at once; at the most {parts})")
        if any(gathers := [rank.gathers for rank in simulation.memory]):
            say(f"gathers    {listed(gathers, 'd')} (of a chunk's weights, per step)")
    say(f"messages   {plan.num_messages} per step")


def _print_measured(measured: Timeline, simulation: Simulation) -> None:
    """Milliseconds, as means over all steps."""
    split = split_bubble(measured)
    print(f"step       {split.step_time:.4g} ms measured, {simulation.makespan:.4g} ms by the plan")
    say(f"bubble     {split}")
    for name in ("waited", "host"):
        means = [fmean(getattr(step[rank], name) for step in measured.steps) for rank in range(measured.plan.pp_size)]
        say(f"{name:<10} {listed(means, '.3g', ' ms per step')}")
    for kind, times in measured.mean_times.items():
        say(f"{f'{kind} takes':<10} {listed(times, '.3g', ' ms', 'stage')}")
    if measured.peak_bytes:
        say(f"bytes      {_bytes(measured.peak_bytes)} (at once, of tensors made in a step)")
    say(f"messages   {measured.plan.num_messages} per step, latency {measured.latency:.3g} ms")
    print_hint(measured)


def _bytes(numbers: Sequence[float]) -> str:
    return listed(list(map(bytes_in_words, numbers)), "s")
