"""The command `megapipe`: look at schedules, and compare them, without running them."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from .charts import save_html, save_picture
from .plan import Plan, load_plan, make_plan
from .registry import find_schedule, schedule_names
from .simulation import Simulation
from .verbs import ScheduleError
from .visualize import save_trace, timeline

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns its exit status: 2 for wrong arguments, with one sentence about what is wrong."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        print(f"megapipe {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megapipe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    show = commands.add_parser("show", help="draw one schedule", description="Draw a schedule's timeline.")
    show.add_argument("schedule", help=f"{', '.join(schedule_names())}, or a file saved with --csv or --json")
    _add_sizes(show, required=False)
    _add_costs(show)
    show.add_argument("--steps", type=int, default=1, help="training steps, one after the other without a barrier")
    show.add_argument("--comms", action="store_true", help="list what each rank does, messages included")
    show.add_argument("--width", type=int, default=None, help="columns of the timeline; default: the terminal's")
    show.add_argument("--csv", metavar="FILE", help="save the actions, a row per rank")
    show.add_argument("--json", metavar="FILE", help="save the actions")
    show.add_argument("--svg", metavar="FILE", help="save the timeline as a picture")
    show.add_argument("--png", metavar="FILE", help="save the timeline as a picture")
    show.add_argument("--html", metavar="FILE", help="save the timeline as a page to zoom and point at")
    show.add_argument("--trace", metavar="FILE", help="save the timeline as a trace that Perfetto opens")
    show.set_defaults(run=_show)

    compare = commands.add_parser(
        "compare", help="all schedules in one table", description="Simulate every schedule, fastest first."
    )
    _add_sizes(compare, required=True)
    _add_costs(compare)
    compare.add_argument(
        "--memory-limit", type=float, default=None, metavar="N", help="microbatches of a whole rank that fit in memory"
    )
    compare.set_defaults(run=_compare)
    return parser


def _add_sizes(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--pp", type=int, required=required, help="pipeline ranks")
    parser.add_argument("--microbatches", type=int, required=required, help="microbatches per step")
    parser.add_argument("--chunks", type=int, default=None, help="stages per rank, for schedules that leave it open")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times", "of one microbatch on a whole rank, in any unit")
    times.add_argument("--forward", type=float, default=1.0)
    times.add_argument("--backward-input", type=float, default=1.0)
    times.add_argument("--backward-weight", type=float, default=1.0)
    times.add_argument("--p2p", type=float, default=0.0, help="latency of a message")
    times.add_argument("--optimizer", type=float, default=0.0, help="the optimizer's step, after each step")


def _simulate(plan: Plan, args: argparse.Namespace, num_steps: int = 1) -> Simulation:
    return plan.simulate(
        args.forward,
        args.backward_input,
        args.backward_weight,
        args.p2p,
        optimizer=args.optimizer,
        num_steps=num_steps,
    )


# show


def _show(args: argparse.Namespace) -> None:
    if args.steps < 1:
        raise ValueError(f"--steps must be at least 1, got {args.steps}.")
    plan = _find_plan(args)
    plan.check()
    simulation = _simulate(plan, args, args.steps)
    if args.csv:
        plan.save_csv(args.csv)
    if args.json:
        plan.save_json(args.json)
    for picture in (args.svg, args.png):
        if picture:
            save_picture(plan, simulation, picture)
    if args.html:
        save_html(plan, simulation, args.html)
    if args.trace:
        save_trace(plan, simulation, args.trace)
    _print_timeline(plan, simulation, args.width)
    if args.comms:
        for rank, events in enumerate(plan.events):
            shown = [str(event) for event in events if event.action is not None or plan.peer(rank, event) is not None]
            print(f"rank {rank}: " + " ".join(shown))
    _print_figures(plan, simulation)


def _find_plan(args: argparse.Namespace) -> Plan:
    if args.schedule.endswith((".csv", ".json")):
        return load_plan(args.schedule)
    find_schedule(args.schedule)  # an unknown name is the first thing to complain about
    if args.pp is None or args.microbatches is None:
        raise ValueError("--pp and --microbatches are needed, unless the schedule is a file.")
    return make_plan(args.schedule, args.pp, args.microbatches, args.chunks)


def _print_timeline(plan: Plan, simulation: Simulation, width: int | None) -> None:
    prefix = len(f"rank {plan.pp_size - 1} ")
    columns = max(20, (width or shutil.get_terminal_size((120, 24)).columns) - prefix)
    rows = timeline(simulation, columns)
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
    def listed(values: Sequence[float], form: str) -> str:
        texts = [format(value, form) for value in values]
        return texts[0] + " on every rank" if len(set(texts)) == 1 else " ".join(texts)

    print(f"step       {simulation.step_time:g}, of at least {simulation.lower_bound:g}")
    print(f"bubble     {listed(simulation.bubble, '.1%')}")
    print(f"in a span  {listed(simulation.inner_bubble, '.1%')}")
    if not plan.forward_only:
        print(f"held       {listed(simulation.peak_activations, 'g')} (microbatches of a whole rank)")
    print(f"messages   {plan.num_messages} per step")


# compare


def _compare(args: argparse.Namespace) -> None:
    rows = []
    for name in schedule_names():
        schedule = find_schedule(name)
        if schedule.forward_only or (schedule.max_pp_size or args.pp) < args.pp:
            continue
        try:
            plan = make_plan(name, args.pp, args.microbatches, args.chunks if schedule.num_chunks is None else None)
        except ScheduleError:
            raise
        except ValueError as error:
            print(f"{name}: {error}")
            continue
        rows.append((plan, _simulate(plan, args)))
    rows.sort(key=lambda row: (row[1].makespan, max(row[1].peak_activations)))
    best = rows[0][1].makespan
    limit = args.memory_limit
    header = f"{'schedule':<18} {'chunks':>6} {'step':>9} {'of best':>8} {'bubble':>7} {'held':>9} {'messages':>8}"
    print(header + ("" if limit is None else f"  fits {limit:g}"))
    for plan, simulation in rows:
        peak = max(simulation.peak_activations)
        line = (
            f"{plan.name:<18} {plan.num_chunks:>6} {simulation.makespan:>9.4g} {simulation.makespan / best:>7.3f}x "
            f"{max(simulation.bubble):>7.1%} {peak:>9.3g} {plan.num_messages:>8}"
        )
        print(line + ("" if limit is None else f"  {'yes' if peak <= limit else 'no'}"))
