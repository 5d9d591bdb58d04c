"""`megapipe compare` and `megapipe tune`: all schedules against each other."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..plan import (
    WEIGHTS,
    Costs,
    Plan,
    ScheduleError,
    Settings,
    Simulation,
    find_schedule,
    place_weights,
    schedule_names,
    simulate,
)
from .bubble import split_bubble
from .command_options import (
    Memory,
    bytes_of,
    check_time,
    costs_of,
    import_schedule,
    memory_of,
    recompute_time,
    record_plan,
    settings_of,
    unsplit,
)
from .progress import doing
from .show_command import print_hint
from .text import bytes_in_words, print_table, say
from .timeline import Timeline, load_timeline

Rows = list[tuple[Plan, Simulation]]

UNITS = "held: microbatches at once on the fullest rank; messages: per step; x2: with 2 chunks"
NEEDS_SPLIT = "* its time takes layers that defer their weight gradients (megapipe.weight_grad), or captured stages"

PLAIN = "1f1b"
"""What is shown in any case, to compare with."""


def compare(args: argparse.Namespace) -> None:
    if any(not path.endswith((".csv", ".json")) for path in args.save):
        raise ValueError(f"--save {' '.join(args.save)}: a table is saved to a file that ends with .csv or .json.")
    costs, (names, own) = costs_of(args), _names_of(args)
    memory = memory_of(args, costs.memory)
    sizes = (args.pp, args.microbatches, args.chunks or [None])
    rows = all_schedules(names, *sizes, costs, args.slices or [1], settings_of(args))
    found = _show_rows(rows, args, memory, own, unit="")
    for path in args.save:
        _save_table(found, path)
    say(f"step: F on a whole rank takes {args.times[0]:g}; {UNITS}")


def tune(args: argparse.Namespace) -> None:
    measured = load_timeline(args.timeline)
    if measured is None:
        raise ValueError(f"{args.timeline} is no measured timeline: record one with config.record_timeline.")
    plan = measured.plan
    plan.check()
    if plan.forward_only:
        raise ValueError(
            f"{args.timeline} has forwards only: to choose a schedule for training, record training steps."
        )
    known: dict[str, Any] = {"memory": bytes_of(args)}
    memory, (names, own) = memory_of(args, known["memory"]), _names_of(args)
    if args.recompute is not None:
        given = recompute_time(args)
        known["recompute"] = measured.rank_costs().recompute if given is None else given
    costs, exact = (replace(costs, **known) for costs in (measured.rank_costs(), measured.costs()))
    _print_times(measured, costs)
    if args.unsplit:
        costs, exact = unsplit(costs), unsplit(exact)
    elif WEIGHTS.name not in measured.mean_times:
        say("(backwards were measured as a whole: half of each counts as input gradients, half as weight gradients)")
    print_hint(measured)
    for option, places in (("recompute", plan.recomputed), ("offload", plan.offloaded)):
        if any(places) and getattr(args, option) is None:
            say(f"(the measured run did what --{option} is for; without it the schedules below do not)")
    slices, chunks = args.slices or [plan.num_slices], args.chunks or [2, 4]
    sizes = (plan.pp_size, args.microbatches or plan.num_microbatches, chunks)
    rows = all_schedules(names, *sizes, costs, slices, settings_of(args), measured, exact)
    _show_rows(rows, args, memory, own, unit="ms")
    say(UNITS)
    plan, simulation = _recommend(rows, memory, may_split=not args.unsplit)
    for path in args.save:
        _save_placed(plan, simulation, costs, memory, path)


def _names_of(args: argparse.Namespace) -> tuple[Iterable[str], list[str]]:
    """The schedules that are compared, and the caller's own among them: not all that their files register."""
    known = schedule_names()
    own = [*map(import_schedule, args.own)]
    return dict.fromkeys([*known, *own]), own


def _print_times(measured: Timeline, costs: Costs) -> None:
    plan, (forward, inputs, weights) = measured.plan, (costs.forward, costs.backward_input, costs.backward_weight)
    say(
        f"measured: {plan.name}, {plan.pp_size} ranks, {plan.num_microbatches} microbatches: "
        f"{split_bubble(measured).step_time:.4g} ms per step, {measured.predict().makespan:.4g} ms by its plan"
    )
    say(
        f"times: forward {forward:.3g}, input gradients {inputs:.3g}, weight gradients {weights:.3g} ms per microbatch "
        f"on a rank (mean of all ranks), a message {costs.p2p:.3g} ms"
    )
    speeds = measured.speeds()
    if min(speeds) < 0.9:
        say(
            f"speeds: {' '.join(f'{speed:.2f}' for speed in speeds)} by the work of each rank. In the table each keeps "
            "its own, with as many layers: distribute_layers(speeds=...) gives slow ranks fewer"
        )


def _save_placed(plan: Plan, simulation: Simulation, costs: Costs, memory: Memory, path: str) -> None:
    if not path.endswith((".json", ".csv")):
        raise ValueError(f"--save {path}: a plan is saved to a file that ends with .json or .csv.")
    if costs.memory is not None:
        costs = replace(costs, memory=costs.memory.even(plan.pp_size))
    limit = None if memory.limit is None else min(memory.limit)
    placed = place_weights(plan, costs, max(simulation.peak_activations) if memory.in_bytes and limit else limit)
    if not memory.fits(simulate(placed, costs)):  # a W that waits may keep more bytes than a microbatch
        placed = plan
    (placed.save_json if path.endswith(".json") else placed.save_csv)(path)
    moved = "as the schedule has it" if placed is plan else "Ws placed by the measured times"
    say(f"saved: {path}, {simulate(placed, costs).makespan:.4g} ms per step ({moved})")


def _recommend(rows: Rows, memory: Memory, may_split: bool) -> tuple[Plan, Simulation]:
    """The one that needs least memory, then fewest messages, of the fastest within the limit."""
    fitting = [row for row in rows if memory.fits(row[1])]
    if not fitting:
        least = min(memory.of(simulation) for _, simulation in rows)
        what = "" if memory.in_bytes else " microbatches of a whole rank"
        raise ValueError(
            f"no schedule fits {memory.limit_in_words}{what}: the smallest needs {memory.in_words(least)}. Use "
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


def all_schedules(
    names: Iterable[str],
    pp_size: int,
    num_microbatches: int,
    chunks: Sequence[int | None],
    costs: Costs,
    slices: Sequence[int],
    settings: Settings,
    measured: Timeline | None = None,
    exact: Costs | None = None,
) -> Rows:
    """Every schedule that trains on so many ranks, fastest first; those that leave it open with each number of chunks,
    and those that cut sequences with each number of slices above 1. What cannot run is printed, with its reason.

    Args:
        measured, exact: a timeline, and its own stages' times, for the schedule and the chunks that it has.
    """
    if costs.memory is not None:
        costs = replace(costs, memory=costs.memory.even(pp_size))
    rows: Rows = []
    for name in names:
        schedule = find_schedule(name)
        if schedule.forward_only or (schedule.max_pp_size or pp_size) < pp_size:
            continue
        open_chunks = chunks if schedule.num_chunks is None else [None]
        open_slices = [n for n in slices if n != 1] if schedule.slices else [1]
        for num_chunks, num_slices in itertools.product(open_chunks, open_slices):
            doing(f"playing {name} on {pp_size} ranks with {num_microbatches} microbatches; {len(rows)} plans are done")
            try:
                plan = record_plan(name, pp_size, num_microbatches, num_chunks, num_slices, settings, costs)
            except ScheduleError as error:
                raise ScheduleError(f"{name}: {error}") from None
            except ValueError as error:
                say(f"{name}: {error}")
                continue
            same = measured and (name, plan.num_chunks, num_slices) == (
                measured.name,
                measured.plan.num_chunks,
                measured.plan.num_slices,
            )
            simulation = simulate(plan, exact if same and exact else costs)
            check_time(simulation)
            rows.append((plan, simulation))
    if not rows:
        raise ValueError(f"no schedule runs {num_microbatches} microbatches on {pp_size} ranks.")
    return sorted(rows, key=lambda row: (row[1].makespan, max(row[1].peak_activations)))


def _show_rows(
    rows: Rows, args: argparse.Namespace, memory: Memory, own: Sequence[str], unit: str
) -> list[dict[str, Any]]:
    """Print those that no other beats, 1F1B and the caller's own; with `--all` the others too. Returns all as
    numbers."""
    found = _found(rows, args, memory)
    shown = [one for one in found if args.all or not one["beaten_by"] or one["schedule"] in (PLAIN, *own)]
    names = [
        one["schedule"]
        + f" x{one['chunks']}" * (one["chunks"] > 1)
        + f", {one['slices']} slices" * (one["slices"] > 1)
        + " *" * one["needs_split"]
        for one in shown
    ]
    fits = "fits" if len(memory.limit or ()) > 1 else f"fits {memory.limit_in_words}"
    columns = {
        "schedule": names,
        f"step {unit}".strip(): [f"{one['step']:.4g}" for one in shown],
        "of best": [f"{one['of_best']:.3f}x" for one in shown],
        "bubble": [f"{one['bubble']:.1%}" for one in shown],
        "held": [f"{one['held']:.3g}" for one in shown],
        "bytes": [bytes_in_words(one["bytes"]) for one in shown if one["bytes"] is not None],
        "messages": [str(one["messages"]) for one in shown],
        fits: [("no", "yes")[one["fits"]] for one in shown if one["fits"] is not None],
        "beaten by": [one["beaten_by"] or "-" for one in shown],
    }
    print_table(columns, ("schedule", fits, "beaten by"), may_go=("of best", "messages", "beaten by", "held"))
    if len(shown) < len(found):
        say(f"{len(found) - len(shown)} more are beaten, in time or memory and in neither better: --all shows them")
    if any(one["needs_split"] for one in shown):
        say(NEEDS_SPLIT)
    return found


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


def front_of(rows: Sequence[tuple[Plan, Simulation]], memory: Memory) -> list[Plan | None]:
    """The schedule that beats each one: that takes no more time and no more memory, and less of one.
    None for one that no other beats. One that does not split its backward counts before those that do, which need
    layers for it."""
    places = [(simulation.makespan, memory.of(simulation)) for _, simulation in rows]
    beaten_by: list[Plan | None] = []
    for own in places:
        others = [plan for (plan, _), place in zip(rows, places) if _beats(place, own)]
        beaten_by.append(min(others, key=lambda plan: plan.splits_backward, default=None))
    return beaten_by


def _beats(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether it is better, by more than rounding, in one respect and not worse in the other."""
    shares = [mine / max(theirs, 1e-300) for mine, theirs in zip(one, other)]
    return max(shares) <= 1 + 1e-9 and min(shares) < 1 - 1e-9


def _save_table(found: list[dict[str, Any]], path: str) -> None:
    if path.endswith(".json"):
        Path(path).write_text(json.dumps(found, indent=1) + "\n")
        return
    with open(path, "w", newline="") as file:
        table = csv.DictWriter(file, found[0])
        table.writeheader()
        table.writerows(found)
