"""`megapipe show`: one schedule, or a measured step above its plan."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from ..plan import (
    WEIGHTS,
    Plan,
    RankStep,
    ScheduleError,
    Simulation,
    Span,
    Standstill,
    find_schedule,
    load_plan,
    record_partly,
    simulate,
    stand_still,
    whole_units,
)
from .bubble import split_bubble
from .charts import save_picture, save_standstill
from .command_options import check_size, check_time, costs_of, import_schedule, record_plan, settings_of
from .text import Form, bytes_in_words, listed, print_legend, print_timeline, say, standstill_as_text
from .timeline import Timeline, load_timeline

SIZES = ("pp", "microbatches", "chunks", "slices")
SETTINGS = ("min_pending_weights", "recompute", "offload")
TIMES = ("unsplit", "times", "p2p", "exchange", "speeds", "bytes")


def show(args: argparse.Namespace) -> None:
    measured = load_timeline(args.schedule) if args.schedule.endswith(".json") else None
    if measured is not None and (given := _given(args, SIZES + SETTINGS + TIMES)):
        raise ValueError(f"{given[0]} is for plans: a measured timeline shows what its layers did. See megapipe tune.")
    plan = _find_plan(args) if measured is None else measured.plan
    try:
        plan.check()
    except ScheduleError:
        show_standstill(stand_still(plan, costs=whole_units(plan)), args.save)
        raise
    check_size(*plan.sizes.values())
    simulation = simulate(plan, costs_of(args)) if measured is None else measured.predict()
    check_time(simulation)
    for path in args.save:
        _save(plan, simulation, measured, path)
    if measured is None:
        used = print_timeline(plan, simulation.spans, args.width, simulation.makespan)
    else:
        used = _print_both(measured, simulation, args.width)
    print_legend(plan, used)
    if measured is None:
        _print_figures(plan, simulation, args.times[0])
    else:
        _print_measured(measured, simulation)


def show_standstill(standstill: Standstill, save: Sequence[str] = ()) -> None:
    """Print a step as far as it goes, and save its pictures. Nothing where all ranks come to the end: what is wrong
    with the plan is something else."""
    if not any(standstill.reasons):
        return
    print(standstill_as_text(standstill))
    say("legend     1B0? the rank waits there for ever; ! it stops with an error")
    for path in save:
        if path.endswith((".svg", ".png")):
            save_standstill(standstill, path)


def _save(plan: Plan, simulation: Simulation, measured: Timeline | None, path: str) -> None:
    if path.endswith(".trace.json"):
        save_trace(plan, simulation, path, measured=[] if measured is None else measured.steps)
    elif path.endswith(".json"):
        plan.save_json(path)
    elif path.endswith(".csv"):
        plan.save_csv(path)
    elif path.endswith((".svg", ".png")):
        save_picture(plan, simulation, path, None if measured is None else measured.typical_step)
    else:
        raise ValueError(f"--save {path}: the ending is one of .csv, .json, .svg, .png and .trace.json.")


def _find_plan(args: argparse.Namespace) -> Plan:
    if args.schedule.endswith((".csv", ".json", ".txt")):
        plan = load_plan(args.schedule)
        told = [name for name in SIZES + SETTINGS if name != "recompute" or not any(plan.recomputed)]  # or R's time
        if given := _given(args, told):
            raise ValueError(f"{given[0]} is for schedules by their names: {args.schedule} says what each rank does.")
        return plan
    name = import_schedule(args.schedule)
    find_schedule(name)  # an unknown name is the first thing to complain about
    missing = [option for option, size in (("--pp", args.pp), ("--microbatches", args.microbatches)) if size is None]
    if missing:
        raise ValueError(f"{' and '.join(missing)}: needed, unless the schedule is a file of a plan or a timeline.")
    chunks, slices = args.chunks or [None], args.slices or [1]
    if len(chunks) + len(slices) > 2:
        raise ValueError("show draws one plan: give one number of --chunks and of --slices, or see megapipe compare.")
    sizes = (args.pp, args.microbatches, chunks[0], slices[0], settings_of(args))
    try:
        return record_plan(name, *sizes, costs_of(args))
    except ScheduleError:
        plan, errors = record_partly(name, *sizes)
        show_standstill(stand_still(plan, errors, whole_units(plan)), args.save)
        raise


def _given(args: argparse.Namespace, names: Sequence[str]) -> list[str]:
    """Those of the options that say something else than their defaults."""
    defaults = {"unsplit": False, "times": [1.0, 1.0, 1.0], "p2p": 0.0, "exchange": 0.0}
    return ["--" + name.replace("_", "-") for name in names if getattr(args, name) != defaults.get(name)]


def _print_both(measured: Timeline, simulation: Simulation, width: int | None) -> list[Form]:
    """The measured step and its plan, on the same scale."""
    spans = [rank.spans for rank in measured.typical_step]
    duration = max(*(rank.end for rank in measured.typical_step), simulation.makespan)
    print(f"measured, the median of {len(measured.steps)} steps:")
    used = print_timeline(measured.plan, spans, width, duration)
    print("by the plan, with the mean times that were measured:")
    print_timeline(measured.plan, simulation.spans, width, duration)
    return used


def _print_figures(plan: Plan, simulation: Simulation, forward: float) -> None:
    bound = f"at least {simulation.lower_bound:g} in any order"
    say(f"step       {simulation.step_time:g}, {bound} (F on a whole rank takes {forward:g})")
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


def print_hint(measured: Timeline) -> None:
    """Say so where the Ws take less than a tenth of the Bs: with layers that defer they take about as long."""
    times = measured.mean_times
    if WEIGHTS.name in times and sum(times[WEIGHTS.name]) < 0.1 * sum(times[WEIGHTS.after or ""]):
        say(
            "hint       the weight-gradient passes (W) are all but empty: the layers compute their weight gradients in "
            "B. To defer them, see megapipe.weight_grad.convert"
        )


def _bytes(numbers: Sequence[float]) -> str:
    return listed(list(map(bytes_in_words, numbers)), "s")


UNIT_US = 1e3
"""Microseconds, the unit of traces, in a millisecond. A simulation's unit of time is shown as a millisecond."""


def save_trace(
    plan: Plan, simulation: Simulation, path: str | Path, measured: Sequence[Sequence[RankStep]] = ()
) -> None:
    """Save a trace in Chrome's JSON format: a process for the plan, with a thread per rank.

    Args:
        simulation: of the plan, in milliseconds or abstract units.
        measured: the steps of a timeline, in milliseconds, per step and rank. They are shown with their waits as
            another process above the plan.
    """
    events = list(_rows(1 if measured else 0, "plan", simulation.spans))
    if measured:
        spans = [[span for step in measured for span in step[rank].spans] for rank in range(plan.pp_size)]
        events += _rows(0, "measured", spans)
    for step in measured:
        for rank, one in enumerate(step):
            for action, start, end in one.waits:
                name = "last sends" if action is None else f"wait of {action}"
                events.append(_event(0, rank, name, "wait", start, end))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _rows(process: int, name: str, ranks: Sequence[Sequence[Span]]) -> Iterator[dict[str, object]]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    for rank, spans in enumerate(ranks):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": {"name": f"rank {rank}"}}
        for action, start, end in spans:
            event = _event(process, rank, str(action), action.kind, start, end)
            yield {**event, "args": {name: value for name, value in action._asdict().items() if name != "kind"}}


def _event(process: int, rank: int, name: str, kind: str, start: float, end: float) -> dict[str, object]:
    times = {"ts": start * UNIT_US, "dur": end * UNIT_US - start * UNIT_US}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": rank, **times}
