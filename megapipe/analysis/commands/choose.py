"""`megapipe compare` and `megapipe tune`: all schedules against each other."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...plan import (
    WEIGHTS,
    Costs,
    Plan,
    ScheduleError,
    Settings,
    Simulation,
    find_schedule,
    load_stage_bytes,
    place_weights,
    schedule_names,
    simulate,
)
from ..bubble import split_bubble
from ..comparison import save_comparison
from ..memory import Memory, bytes_in_words, front_of
from ..pages import save_comparison_html
from ..timeline import load_timeline
from .options import (
    add_bytes,
    add_costs,
    add_limit,
    add_pictures,
    add_settings,
    add_sizes,
    add_unsplit,
    check_time,
    costs_of,
    memory_of,
    recompute_time,
    record_plan,
    settings_of,
    unsplit,
)
from .terminal import print_hint, print_table, say

__all__ = ["add_compare", "add_tune"]

Rows = list[tuple[Plan, Simulation]]

UNITS = "held: microbatches at once on the fullest rank; messages: per step; x2: with 2 chunks"

NEEDS_SPLIT = "* its time takes layers that defer their weight gradients (megapipe.weight_grad), or captured stages"


def add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare", help="all schedules in one table", description="Simulate every schedule, fastest first."
    )
    add_sizes(compare, required=True)
    add_settings(compare)
    add_costs(compare)
    add_bytes(compare)
    _add_choice(compare)
    compare.set_defaults(run=_compare)


def add_tune(commands: Any) -> None:
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
    add_settings(tune)
    add_unsplit(tune)
    tune.add_argument("--bytes", metavar="FILE", help="those of each stage, as StageBytes.save wrote them")
    tune.add_argument(
        "--save",
        metavar="FILE",
        help="write the recommended plan, its Ws placed by the measured times, for get_forward_backward_func(FILE); "
        "FILE ends with .json or .csv",
    )
    _add_choice(tune)
    tune.set_defaults(run=_tune)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    add_limit(parser)
    add_pictures(parser, "a chart of time against memory")
    parser.add_argument("--csv", metavar="FILE", help="save the table, times and bytes as plain numbers")
    parser.add_argument("--json", metavar="FILE", help="save the table")


def _compare(args: argparse.Namespace) -> None:
    costs = costs_of(args)
    memory = memory_of(args, costs.memory)
    rows = _all_schedules(args.pp, args.microbatches, [args.chunks], costs, [args.slices], settings_of(args))
    _show_rows(rows, args, memory, unit="")
    say(f"step: F of a microbatch on a whole rank takes {args.forward:g}; {UNITS}")


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
    costs.memory = None if args.bytes is None else load_stage_bytes(args.bytes)
    memory = memory_of(args, costs.memory)
    times = (costs.forward, costs.backward_input, costs.backward_weight)
    say(
        f"measured: {plan.name}, {plan.pp_size} ranks, {plan.num_microbatches} microbatches: "
        f"{split_bubble(measured).step_time:.4g} ms per step, {measured.predict().makespan:.4g} ms by its plan"
    )
    say(
        "times: forward {:.3g}, input gradients {:.3g}, weight gradients {:.3g} ms".format(*times)
        + f" per microbatch on a rank (mean of all ranks), a message {costs.p2p:.3g} ms"
    )
    if args.unsplit:
        costs = unsplit(costs)
    elif WEIGHTS.name not in measured.mean_times:
        say("(backwards were measured as a whole: half of each counts as input gradients, half as weight gradients)")
    print_hint(measured)
    num_microbatches = plan.num_microbatches if args.microbatches is None else args.microbatches
    if args.recompute is not None:
        costs = replace(costs, recompute=recompute_time(args) or costs.recompute)
    slices = args.slices or [plan.num_slices]
    rows = _all_schedules(plan.pp_size, num_microbatches, args.chunks, costs, slices, settings_of(args))
    _show_rows(rows, args, memory, unit="ms")
    say(UNITS)
    plan, simulation = _recommend(rows, memory, may_split=not args.unsplit)
    if args.save:
        held = max(simulation.peak_activations) if memory.in_bytes and memory.limit is not None else memory.limit
        _save_placed(plan, costs, held, args.save)


def _save_placed(plan: Plan, costs: Costs, limit: float | None, path: str) -> None:
    placed = place_weights(plan, costs, limit)
    if path.endswith(".json"):
        placed.save_json(path)
    elif path.endswith(".csv"):
        placed.save_csv(path)
    else:
        raise ValueError(f"--save {path}: a plan is saved to a file that ends with .json or .csv.")
    moved = "as the schedule has it" if placed is plan else "Ws placed by the measured times"
    say(f"saved: {path}, {simulate(placed, costs).makespan:.4g} ms per step ({moved})")


def _recommend(rows: Rows, memory: Memory, may_split: bool) -> tuple[Plan, Simulation]:
    """The one that needs least memory, then fewest messages, of the fastest within the limit."""
    fitting = [row for row in rows if memory.fits(row[1])]
    if not fitting:
        assert memory.limit is not None
        least = min(memory.of(simulation) for _, simulation in rows)
        what = "" if memory.in_bytes else " microbatches of a whole rank"
        raise ValueError(
            f"no schedule fits {memory.in_words(memory.limit)}{what}: the smallest needs {memory.in_words(least)}. Use "
            "smaller microbatches, activation checkpointing, or more ranks."
        )
    fastest = min(simulation.makespan for _, simulation in fitting)
    plan, simulation = min(
        (row for row in fitting if row[1].makespan <= 1.001 * fastest),
        key=lambda row: (memory.of(row[1]), row[0].num_messages),
    )
    sizes = []
    if plan.num_chunks > 1:
        sizes.append(f"{plan.num_chunks} chunks per rank ({plan.pp_size * plan.num_chunks} stages)")
    if plan.num_slices > 1:
        sizes.append(f"{plan.num_slices} slices per sequence")
    choice = plan.name + " with " * bool(sizes) + " and ".join(sizes)
    needed = ", where layers defer their weight gradients" if may_split and plan.splits_backward else ""
    say(f"recommended: {choice}, {simulation.makespan:.4g} ms per step{needed}")
    return plan, simulation


def _all_schedules(
    pp_size: int,
    num_microbatches: int,
    chunks: Sequence[int | None],
    costs: Costs,
    slices: Sequence[int],
    settings: Settings,
) -> Rows:
    """Every schedule that trains on so many ranks, fastest first; those that leave it open with each number of chunks,
    and those that cut sequences with each number of slices above 1. What cannot run is printed, with its reason."""
    if costs.memory is not None:
        costs = replace(costs, memory=costs.memory.even(pp_size))
    rows: Rows = []
    for name in schedule_names():
        schedule = find_schedule(name)
        if schedule.forward_only or (schedule.max_pp_size or pp_size) < pp_size:
            continue
        open_chunks = chunks if schedule.num_chunks is None else [None]
        open_slices = [n for n in slices if n != 1] if schedule.slices else [1]
        for num_chunks, num_slices in itertools.product(open_chunks, open_slices):
            try:
                plan = record_plan(name, pp_size, num_microbatches, num_chunks, num_slices, settings, costs)
            except ScheduleError:
                raise
            except ValueError as error:
                say(f"{name}: {error}")
                continue
            simulation = simulate(plan, costs)
            check_time(simulation)
            rows.append((plan, simulation))
    if not rows:
        raise ValueError(f"no schedule runs {num_microbatches} microbatches on {pp_size} ranks.")
    return sorted(rows, key=lambda row: (row[1].makespan, max(row[1].peak_activations)))


def _show_rows(rows: Rows, args: argparse.Namespace, memory: Memory, unit: str) -> None:
    for picture in (args.svg, args.png):
        if picture:
            save_comparison(rows, picture, memory, unit)
    if args.html:
        save_comparison_html(rows, args.html, memory, unit)
    found = _found(rows, args, memory)
    _save_found(found, args)
    names = [
        one["schedule"] + f", {one['slices']} slices" * (one["slices"] > 1) + " *" * one["needs_split"] for one in found
    ]
    fits = f"fits {memory.in_words(memory.limit or 0)}"
    columns = {
        "schedule": names,
        "chunks": [str(one["chunks"]) for one in found],
        f"step {unit}".strip(): [f"{one['step']:.4g}" for one in found],
        "of best": [f"{one['of_best']:.3f}x" for one in found],
        "bubble": [f"{one['bubble']:.1%}" for one in found],
        "held": [f"{one['held']:.3g}" for one in found],
        "bytes": [bytes_in_words(one["bytes"]) for one in found if one["bytes"] is not None],
        "messages": [str(one["messages"]) for one in found],
        fits: [("no", "yes")[one["fits"]] for one in found if one["fits"] is not None],
        "beaten by": [one["beaten_by"] or "-" for one in found],
    }
    print_table(columns, ("schedule", fits, "beaten by"), may_go=("of best", "messages", "chunks", "beaten by", "held"))
    if any(one["needs_split"] for one in found):
        say(NEEDS_SPLIT)


def _found(rows: Rows, args: argparse.Namespace, memory: Memory) -> list[dict[str, Any]]:
    """What is shown of each schedule, as numbers."""
    best = rows[0][1].makespan
    return [
        {
            "schedule": plan.name,
            "chunks": plan.num_chunks,
            "slices": plan.num_slices,
            "step": simulation.makespan,
            "of_best": simulation.makespan / best,
            "bubble": max(simulation.bubble),
            "held": max(simulation.peak_activations),
            "bytes": None if simulation.memory is None else max(simulation.peak_bytes),
            "messages": plan.num_messages,
            "fits": None if memory.limit is None else memory.fits(simulation),
            "beaten_by": winner and winner.name + f" x{winner.num_chunks}" * (winner.num_chunks > 1),
            "needs_split": plan.splits_backward and not args.unsplit,
        }
        for (plan, simulation), winner in zip(rows, front_of(rows, memory))
    ]


def _save_found(found: list[dict[str, Any]], args: argparse.Namespace) -> None:
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")
    if args.csv:
        with open(args.csv, "w", newline="") as file:
            table = csv.DictWriter(file, found[0])
            table.writeheader()
            table.writerows(found)
