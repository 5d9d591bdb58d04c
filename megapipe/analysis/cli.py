"""The command `megapipe`: look at schedules, and compare them, before they run and after."""

from __future__ import annotations

import argparse
import itertools
import math
import os
import shutil
import sys
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from ..plan import (
    Costs,
    Plan,
    ScheduleError,
    Simulation,
    Span,
    find_schedule,
    load_plan,
    make_plan,
    schedule_names,
    simulate,
)
from .bubble import split_bubble
from .charts import save_comparison, save_picture
from .pages import save_comparison_html, save_html
from .text import text_rows
from .timeline import Timeline, load_timeline
from .trace import save_trace

__all__ = ["main"]

LARGEST = 1_000_000
"""The most forwards in a plan: ranks x microbatches x chunks x slices x steps. That many take minutes and some GB."""

WIDEST = 10_000
"""The most columns of a timeline: far more than a terminal has, and still quick to print."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the command's name; None takes those of the process.

    Returns:
        Its exit status: 2 for wrong arguments, after one sentence about what is wrong; 1 where its output is not read
        to the end, as in `megapipe compare ... | head`.
    """
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so when it ends
        return 1
    except (ValueError, OSError) as error:
        print(f"megapipe {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megapipe", description="Look at schedules, before they run and after.")
    commands = parser.add_subparsers(dest="command", required=True)

    show = commands.add_parser("show", help="draw one schedule", description="Draw a schedule's timeline.")
    files = "a file saved with --csv or --json, or a measured timeline"
    show.add_argument("schedule", help=f"{', '.join(schedule_names())}, {files}")
    _add_sizes(show, required=False)
    _add_costs(show)
    show.add_argument(
        "--steps", type=int, default=1, metavar="N", help="training steps, one after the other without a barrier"
    )
    show.add_argument("--comms", action="store_true", help="list what each rank does, messages included")
    show.add_argument("--width", type=int, metavar="N", help="columns of the timeline; default: the terminal's")
    show.add_argument("--csv", metavar="FILE", help="save the actions, a row per rank")
    show.add_argument("--json", metavar="FILE", help="save the actions")
    _add_pictures(show, "the timeline")
    show.add_argument("--trace", metavar="FILE", help="save the timeline as a trace that Perfetto opens")
    show.set_defaults(run=_show)

    compare = commands.add_parser(
        "compare", help="all schedules in one table", description="Simulate every schedule, fastest first."
    )
    _add_sizes(compare, required=True)
    _add_costs(compare)
    _add_choice(compare)
    compare.set_defaults(run=_compare)

    tune = commands.add_parser(
        "tune",
        help="recommend a schedule",
        description="Predict every schedule's step time from a measured timeline, and recommend one.",
    )
    tune.add_argument("timeline", help="the file that was recorded")
    tune.add_argument("--microbatches", type=int, metavar="N", help="microbatches per step; default: as measured")
    tune.add_argument(
        "--chunks",
        type=int,
        nargs="+",
        default=[2, 4],
        metavar="N",
        help="stages per rank to try, for schedules that leave it open; default: 2 4",
    )
    tune.add_argument(
        "--slices",
        type=int,
        nargs="+",
        default=[],
        metavar="N",
        help="slices of equal cost per sequence to try, for models that know slices; default: as measured",
    )
    _add_choice(tune)
    tune.set_defaults(run=_tune)
    return parser


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit", type=float, default=None, metavar="N", help="microbatches that a rank has memory for at once"
    )
    _add_pictures(parser, "a chart of time against memory")


def _add_pictures(parser: argparse.ArgumentParser, what: str) -> None:
    for ending, form in (("svg", "a picture"), ("png", "a picture"), ("html", "a page to zoom and point at")):
        parser.add_argument(f"--{ending}", metavar="FILE", help=f"save {what} as {form}")


def _add_sizes(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--pp", type=int, required=required, metavar="N", help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=required, metavar="N", help="microbatches per step")
    parser.add_argument("--chunks", type=int, metavar="N", help="stages per rank, for schedules that leave it open")
    parser.add_argument(
        "--slices",
        type=int,
        default=1,
        metavar="N",
        help="slices per sequence, for schedules that cut them; default: 1",
    )


def _add_costs(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times", "of one microbatch on a whole rank, in any unit")
    for name, default, what in (
        ("--forward", 1.0, "F"),
        ("--backward-input", 1.0, "B, the part of the backward for the input"),
        ("--backward-weight", 1.0, "W, the part for the weights"),
        ("--p2p", 0.0, "latency of a message"),
        ("--optimizer", 0.0, "the optimizer's step, after each step"),
    ):
        times.add_argument(name, type=float, default=default, metavar="T", help=f"{what}; default: {default:g}")
    times.add_argument(
        "--overlap",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="of the shorter of an overlapped F and B, how much the longer hides; default: 0",
    )


def _costs(args: argparse.Namespace) -> Costs:
    times = (args.forward, args.backward_input, args.backward_weight, args.p2p)
    if not any(times[:3]):
        raise ValueError("--forward, --backward-input and --backward-weight are all 0: there is nothing to draw.")
    return Costs(*times, optimizer=args.optimizer, overlap=args.overlap)


# show


def _show(args: argparse.Namespace) -> None:
    measured = load_timeline(args.schedule) if args.schedule.endswith(".json") else None
    plan = _find_plan(args) if measured is None else measured.plan
    plan.check()
    _check_size(*plan.sizes.values(), args.steps)
    simulation = simulate(plan, _costs(args), args.steps) if measured is None else measured.predict()
    _check_time(simulation)
    _save_files(plan, simulation, measured, args)
    if measured is None:
        _print_timeline(plan, simulation.spans, args.width, simulation.makespan)
    else:
        _print_both(measured, simulation, args.width)
    if args.comms:
        for rank, events in enumerate(plan.events):
            shown = [str(event) for event in events if event.action is not None or plan.peer(rank, event) is not None]
            print(f"rank {rank}: " + " ".join(shown))
    if measured is None:
        _print_figures(plan, simulation)
    else:
        _print_measured(measured, simulation)


def _check_size(*sizes: int) -> None:
    if math.prod(sizes) > LARGEST:
        raise ValueError(
            f"{' x '.join(map(str, sizes))} forwards (ranks, microbatches, chunks, slices, steps) take too long to "
            f"look at: choose sizes of which the product is at most {LARGEST:,}."
        )


def _check_time(simulation: Simulation) -> None:
    if not 1e-100 < simulation.makespan < 1e100:
        raise ValueError(
            f"with these times a step takes {simulation.makespan:g}, which cannot be compared or drawn: use others."
        )


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
    return _make_plan(args.schedule, args.pp, args.microbatches, args.chunks, args.slices)


def _make_plan(schedule: str, pp_size: int, num_microbatches: int, num_chunks: int | None, num_slices: int = 1) -> Plan:
    _check_size(pp_size, num_microbatches, find_schedule(schedule).check(pp_size, num_chunks), num_slices)
    return make_plan(schedule, pp_size, num_microbatches, num_chunks, num_slices=num_slices)


def _print_both(measured: Timeline, simulation: Simulation, width: int | None) -> None:
    """The measured step and its plan, on the same scale."""
    spans = [rank.spans for rank in measured.typical_step]
    duration = max(rank.end for rank in measured.typical_step)
    print(f"measured, the median of {len(measured.steps)} steps:")
    _print_timeline(measured.plan, spans, width, max(duration, simulation.makespan))
    print("by the plan, with the mean times that were measured:")
    _print_timeline(measured.plan, simulation.spans, width, max(duration, simulation.makespan))


def _print_timeline(plan: Plan, ranks: Sequence[Sequence[Span]], width: int | None, duration: float) -> None:
    prefix = len(f"rank {plan.pp_size - 1} ")
    columns = max(20, (width or shutil.get_terminal_size((120, 24)).columns) - prefix)
    if columns > WIDEST:
        raise ValueError(f"{columns} columns are more than any terminal has: choose a --width of {WIDEST:,} at most.")
    rows = text_rows(ranks, columns, duration)
    console = _console()
    for rank, row in enumerate(rows):
        name = f"rank {rank}".ljust(prefix)
        if console is None:
            print(name + "".join(text if action else "." * len(text) for text, action in row))
        else:
            from rich.text import Text

            line = Text(name, no_wrap=True, overflow="crop")
            for text, action in row:
                line.append(text, style=_STYLES[action.kind][plan.chunk_of(action.stage) % 2] if action else "")
            console.print(line)


# Per kind of action, the colours of even and odd chunks.
_STYLES = {
    "F": ("black on bright_blue", "white on blue"),
    "BW": ("black on bright_green", "white on green"),
    "B": ("black on bright_green", "white on green"),
    "W": ("black on bright_yellow", "black on yellow"),
}


def _console() -> Any:
    """rich's console, where it is installed and the output is a terminal with colours."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(highlight=False, soft_wrap=True)
    return console if console.is_terminal and console.color_system is not None else None


def _print_figures(plan: Plan, simulation: Simulation) -> None:
    print(f"step       {simulation.step_time:g}, of at least {simulation.lower_bound:g}")
    print(f"bubble     {_listed(simulation.bubble, '.1%')}")
    print(f"in a span  {_listed(simulation.inner_bubble, '.1%')} (from a rank's first action to its last)")
    if not plan.forward_only:
        share = f", a chunk's counted as 1/{plan.num_chunks}" if plan.num_chunks > 1 else ""
        share += f", a slice as 1/{plan.num_slices}" if plan.num_slices > 1 else ""
        print(f"held       {_listed(simulation.peak_activations, 'g')} (microbatches at once{share})")
    print(f"messages   {plan.num_messages} per step")


def _print_measured(measured: Timeline, simulation: Simulation) -> None:
    """Milliseconds, as means over all steps."""
    split = split_bubble(measured)
    print(f"step       {split.step_time:.4g} ms measured, {simulation.makespan:.4g} ms by the plan")
    print(f"bubble     {split}")
    for name in ("waited", "host"):
        means = [fmean(getattr(step[rank], name) for step in measured.steps) for rank in range(measured.plan.pp_size)]
        print(f"{name:<10} {_listed(means, '.3g', ' ms per step')}")
    for kind, times in measured.mean_times.items():
        print(f"{f'{kind} takes':<10} {_listed(times, '.3g', ' ms', 'stage')}")
    print(f"messages   {measured.plan.num_messages} per step, latency {measured.latency:.3g} ms")
    _print_hint(measured)


def _print_hint(measured: Timeline) -> None:
    """Say so where the Ws take less than a tenth of the Bs: with layers that defer they take about as long."""
    times = measured.mean_times
    if "W" in times and sum(times["W"]) < 0.1 * sum(times["B"]):
        print(
            "hint       the weight-gradient passes (W) are all but empty: the layers compute their weight gradients in "
            "B. To defer them, see megapipe.weight_grad.convert"
        )


def _listed(values: Sequence[float], form: str, unit: str = "", what: str = "rank") -> str:
    texts = [format(value, form) for value in values]
    return f"{texts[0]}{unit} on every {what}" if len(set(texts)) == 1 else " ".join(texts) + unit


# compare and tune

Rows = list[tuple[Plan, Simulation]]


def _compare(args: argparse.Namespace) -> None:
    rows = _all_schedules(args.pp, args.microbatches, [args.chunks], _costs(args), [args.slices])
    _show_rows(rows, args, unit="")


def _tune(args: argparse.Namespace) -> None:
    measured = load_timeline(args.timeline)
    if measured is None:
        raise ValueError(f"{args.timeline} is no measured timeline: record one with config.record_timeline.")
    plan, costs = measured.plan, measured.even_costs()
    plan.check()
    if plan.forward_only:
        raise ValueError(
            f"{args.timeline} has forwards only: to choose a schedule for training, record training steps."
        )
    times = (costs.forward, costs.backward_input, costs.backward_weight)
    print(
        f"measured: {plan.name}, {plan.pp_size} ranks, {plan.num_microbatches} microbatches: "
        f"{split_bubble(measured).step_time:.4g} ms per step, {measured.predict().makespan:.4g} by its plan"
    )
    print("times: forward {:.3g}, input gradients {:.3g}, weight gradients {:.3g} ms".format(*times), end=" ")
    print(f"per microbatch on a rank (mean of all ranks), a message {costs.p2p:.3g} ms")
    if "W" not in measured.mean_times:
        print("(backwards were measured as a whole: half of each counts as input gradients, half as weight gradients)")
    _print_hint(measured)
    num_microbatches = plan.num_microbatches if args.microbatches is None else args.microbatches
    rows = _all_schedules(plan.pp_size, num_microbatches, args.chunks, costs, args.slices or [plan.num_slices])
    _show_rows(rows, args, unit="ms")
    _recommend(rows, args.memory_limit)


def _recommend(rows: Rows, limit: float | None) -> None:
    """Of the fastest within the limit the one that needs least memory, then fewest messages."""
    fitting = [row for row in rows if limit is None or max(row[1].peak_activations) <= limit]
    if not fitting:
        least = min(max(simulation.peak_activations) for _, simulation in rows)
        raise ValueError(
            f"no schedule fits {limit:g} microbatches of a whole rank: the smallest needs {least:.3g}. Use smaller "
            "microbatches, activation checkpointing, or more ranks."
        )
    fastest = min(simulation.makespan for _, simulation in fitting)
    plan, simulation = min(
        (row for row in fitting if row[1].makespan <= 1.001 * fastest),
        key=lambda row: (max(row[1].peak_activations), row[0].num_messages),
    )
    sizes = []
    if plan.num_chunks > 1:
        sizes.append(f"{plan.num_chunks} chunks per rank ({plan.pp_size * plan.num_chunks} stages)")
    if plan.num_slices > 1:
        sizes.append(f"{plan.num_slices} slices per sequence")
    choice = plan.name + " with " * bool(sizes) + " and ".join(sizes)
    print(f"recommended: {choice}, {simulation.makespan:.4g} ms per step")


def _all_schedules(
    pp_size: int, num_microbatches: int, chunks: Sequence[int | None], costs: Costs, slices: Sequence[int]
) -> Rows:
    """Every schedule that trains on so many ranks, fastest first; those that leave it open with each number of chunks,
    and those that cut sequences with each number of slices above 1. What cannot run is printed, with its reason."""
    rows: Rows = []
    for name in schedule_names():
        schedule = find_schedule(name)
        if schedule.forward_only or (schedule.max_pp_size or pp_size) < pp_size:
            continue
        open_chunks = chunks if schedule.num_chunks is None else [None]
        open_slices = [n for n in slices if n != 1] if schedule.slices else [1]
        for num_chunks, num_slices in itertools.product(open_chunks, open_slices):
            try:
                plan = _make_plan(name, pp_size, num_microbatches, num_chunks, num_slices)
            except ScheduleError:
                raise
            except ValueError as error:
                print(f"{name}: {error}")
                continue
            simulation = simulate(plan, costs)
            _check_time(simulation)
            rows.append((plan, simulation))
    if not rows:
        raise ValueError(f"no schedule runs {num_microbatches} microbatches on {pp_size} ranks.")
    return sorted(rows, key=lambda row: (row[1].makespan, max(row[1].peak_activations)))


def _show_rows(rows: Rows, args: argparse.Namespace, unit: str) -> None:
    limit = args.memory_limit
    if limit is not None and math.isnan(limit):
        raise ValueError("--memory-limit is a number of microbatches, got nan.")
    for picture in (args.svg, args.png):
        if picture:
            save_comparison(rows, picture, limit, unit)
    if args.html:
        save_comparison_html(rows, args.html, limit, unit)
    best = rows[0][1].makespan
    names = [plan.name + f", {plan.num_slices} slices" * (plan.num_slices > 1) for plan, _ in rows]
    width = max(18, *map(len, names))
    header = f"{'schedule':<{width}} {'chunks':>6} {'step':>9} {'of best':>8} {'bubble':>7} {'held':>9} {'messages':>8}"
    print(header + ("" if limit is None else f"  fits {limit:g}"))
    for name, (plan, simulation) in zip(names, rows):
        peak = max(simulation.peak_activations)
        line = (
            f"{name:<{width}} {plan.num_chunks:>6} {simulation.makespan:>9.4g} {simulation.makespan / best:>7.3f}x "
            f"{max(simulation.bubble):>7.1%} {peak:>9.3g} {plan.num_messages:>8}"
        )
        print(line + ("" if limit is None else f"  {'yes' if peak <= limit else 'no'}"))
