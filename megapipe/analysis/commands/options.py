"""What several subcommands ask for, and what they refuse."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...plan import Costs, Plan, Settings, Simulation, StageBytes, find_schedule, load_stage_bytes, make_plan
from ..memory import Memory, parse_bytes

__all__ = [
    "add_bytes",
    "add_costs",
    "add_limit",
    "add_pictures",
    "add_settings",
    "add_sizes",
    "add_unsplit",
    "bytes_of",
    "check_size",
    "check_time",
    "costs_of",
    "memory_of",
    "recompute_time",
    "record_plan",
    "settings_of",
    "unsplit",
]

SIZES = ("saved", "model", "message", "gathered")

LARGEST = 1_000_000
"""The most forwards in a plan: ranks x microbatches x chunks x slices x steps. That many take minutes and some GB."""


def add_pictures(parser: argparse.ArgumentParser, what: str) -> None:
    for ending, form in (("svg", "a picture"), ("png", "a picture"), ("html", "a page for a browser")):
        parser.add_argument(f"--{ending}", metavar="FILE", help=f"save {what} as {form}")


def add_sizes(parser: argparse.ArgumentParser, required: bool) -> None:
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


def add_settings(parser: argparse.ArgumentParser) -> None:
    settings = parser.add_argument_group("settings", "of the config, for schedules that know them")
    for name, what in (
        ("--min-pending-weights", "Ws that stay pending until the last B is done, for the windows of --exchange"),
        ("--max-pending-weights", "most Ws that stay pending after a B"),
    ):
        settings.add_argument(name, type=int, metavar="N", help=what)
    settings.add_argument(
        "--recompute",
        type=float,
        nargs="?",
        const=math.nan,
        metavar="T",
        help="activations are computed again before each B (R), in time T, or that of F without it; at most one W is "
        "pending then",
    )
    settings.add_argument(
        "--offload",
        type=float,
        metavar="T",
        help="activations go to host memory where they are back in time (O, L), and a copy takes T times as long as "
        "their F; at most one W is pending then",
    )


def settings_of(args: argparse.Namespace) -> Settings:
    for name in ("min_pending_weights", "max_pending_weights"):
        number = getattr(args, name)
        if number is not None and number < 0:
            raise ValueError(f"--{name.replace('_', '-')} is a number of Ws from 0 on, got {number}.")
    return Settings(
        min_pending_weights=args.min_pending_weights or 0,
        max_pending_weights=args.max_pending_weights,
        recompute=args.recompute is not None,
        offload=args.offload,
    )


def add_costs(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times", "of one microbatch on a whole rank, in any unit")
    for name, default, what in (
        ("--forward", 1.0, "F, the forward"),
        ("--backward-input", 1.0, "B, the part of the backward for the input"),
        ("--backward-weight", 1.0, "W, the part for the weights"),
        ("--p2p", 0.0, "latency of a message"),
        ("--exchange", 0.0, "the part of F, and of B, that is communication within stages, and that pairs and Ws hide"),
        ("--optimizer", 0.0, "the optimizer's step, after each step"),
    ):
        times.add_argument(name, type=float, default=default, metavar="T", help=f"{what}; default: {default:g}")
    add_unsplit(times)


def recompute_time(args: argparse.Namespace) -> float | None:
    """None for that of F."""
    return None if args.recompute is None or math.isnan(args.recompute) else args.recompute


def add_unsplit(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--unsplit",
        action="store_true",
        help="for layers that do not defer their weight gradients (megapipe.weight_grad): B takes W's time too, W none",
    )


def add_bytes(parser: argparse.ArgumentParser) -> None:
    sizes = parser.add_argument_group("bytes", "such as 1.5GB or 800MiB; shown beside microbatches")
    sizes.add_argument("--bytes", metavar="FILE", help="those of each stage, as StageBytes.save wrote them")
    for name, what in (
        ("--saved", "what the F of a microbatch leaves on a whole rank, for its backward"),
        ("--model", "weights, gradients and optimizer state of a rank"),
        ("--message", "the output of a stage"),
        ("--gathered", "weights of a rank that replicas share out (fully_shard), while all of its chunks are gathered"),
    ):
        sizes.add_argument(name, metavar="SIZE", help=what)

    sizes.add_argument("--max-gathered", type=int, metavar="N", help="chunks that are gathered at a time; default: all")


def add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-limit",
        metavar="N",
        help="microbatches that a rank has memory for at once, or, where bytes are known, a size such as 80GB",
    )


def bytes_of(args: argparse.Namespace) -> StageBytes | None:
    """The bytes of stages that the caller gave; None for none."""
    sizes = {name: getattr(args, name) for name in SIZES}
    given: dict[str, Any] = {name: parse_bytes(size) for name, size in sizes.items() if size is not None}
    if args.max_gathered is not None:
        given["max_gathered"] = args.max_gathered
    if args.bytes is not None:
        if given:
            raise ValueError(f"--bytes {args.bytes} has all sizes: leave out {_options(given)}.")
        return load_stage_bytes(args.bytes)
    if given and "saved" not in given:
        raise ValueError(f"{_options(given)} need --saved too: what the F of a microbatch leaves on a rank.")
    return StageBytes(**given) if given else None


def _options(names: Iterable[str]) -> str:
    return " and ".join(f"--{name.replace('_', '-')}" for name in names)


def memory_of(args: argparse.Namespace, known: StageBytes | None) -> Memory:
    """What is counted, and the limit. One in microbatches is for these, one with a unit for bytes."""
    limit: str | None = args.memory_limit
    if limit is None:
        return Memory(in_bytes=known is not None)
    try:
        number = float(limit)
    except ValueError:
        if known is None:
            raise ValueError(
                f"--memory-limit {limit} is in bytes, and those of the stages are not known: give --bytes or --saved, "
                "or a number of microbatches."
            ) from None
        return Memory(True, parse_bytes(limit))
    if math.isnan(number):
        raise ValueError("--memory-limit is a number of microbatches, got nan.")
    return Memory(False, number)


def unsplit(costs: Costs) -> Costs:
    """The costs of layers that compute their weight gradients in B."""
    assert isinstance(costs.backward_input, float)
    assert isinstance(costs.backward_weight, float)
    return replace(costs, backward_input=costs.backward_input + costs.backward_weight, backward_weight=0.0)


def costs_of(args: argparse.Namespace) -> Costs:
    times = (args.forward, args.backward_input, args.backward_weight, args.p2p)
    if not any(times[:3]):
        raise ValueError("--forward, --backward-input and --backward-weight are all 0: there is nothing to draw.")
    times_of = {"optimizer": args.optimizer, "exchange": args.exchange, "recompute": recompute_time(args)}
    costs = Costs(*times, **times_of, memory=bytes_of(args))
    return unsplit(costs) if args.unsplit else costs


def check_size(*sizes: int) -> None:
    if math.prod(sizes) > LARGEST:
        raise ValueError(
            f"{' x '.join(map(str, sizes))} forwards (ranks, microbatches, chunks, slices, steps) take too long to "
            f"look at: choose sizes of which the product is at most {LARGEST:,}."
        )


def check_time(simulation: Simulation) -> None:
    if not 1e-100 < simulation.makespan < 1e100:
        raise ValueError(
            f"with these times a step takes {simulation.makespan:g}, which cannot be compared or drawn: use others."
        )


def record_plan(
    schedule: str,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int | None,
    num_slices: int = 1,
    settings: Settings | None = None,
    costs: Costs | None = None,
) -> Plan:
    check_size(pp_size, num_microbatches, find_schedule(schedule).check(pp_size, num_chunks), num_slices)
    sizes = (pp_size, num_microbatches, num_chunks)
    return make_plan(schedule, *sizes, num_slices=num_slices, settings=settings, costs=costs)
