"""What several subcommands ask for, and what they refuse."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

from ...plan import Costs, Plan, Settings, Simulation, find_schedule, make_plan

__all__ = [
    "add_costs",
    "add_pictures",
    "add_settings",
    "add_sizes",
    "add_unsplit",
    "check_size",
    "check_time",
    "costs_of",
    "record_plan",
    "settings_of",
    "unsplit",
]

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


def settings_of(args: argparse.Namespace) -> Settings:
    for name in ("min_pending_weights", "max_pending_weights"):
        number = getattr(args, name)
        if number is not None and number < 0:
            raise ValueError(f"--{name.replace('_', '-')} is a number of Ws from 0 on, got {number}.")
    return Settings(min_pending_weights=args.min_pending_weights or 0, max_pending_weights=args.max_pending_weights)


def add_costs(parser: argparse.ArgumentParser) -> None:
    times = parser.add_argument_group("times", "of one microbatch on a whole rank, in any unit")
    for name, default, what in (
        ("--forward", 1.0, "F"),
        ("--backward-input", 1.0, "B, the part of the backward for the input"),
        ("--backward-weight", 1.0, "W, the part for the weights"),
        ("--p2p", 0.0, "latency of a message"),
        ("--exchange", 0.0, "the part of F, and of B, that is communication within stages, and that pairs and Ws hide"),
        ("--optimizer", 0.0, "the optimizer's step, after each step"),
    ):
        times.add_argument(name, type=float, default=default, metavar="T", help=f"{what}; default: {default:g}")
    add_unsplit(times)


def add_unsplit(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    parser.add_argument(
        "--unsplit",
        action="store_true",
        help="for layers that do not defer their weight gradients (megapipe.weight_grad): B takes W's time too, W none",
    )


def unsplit(costs: Costs) -> Costs:
    """The costs of layers that compute their weight gradients in B."""
    assert isinstance(costs.backward_input, float)
    assert isinstance(costs.backward_weight, float)
    return replace(costs, backward_input=costs.backward_input + costs.backward_weight, backward_weight=0.0)


def costs_of(args: argparse.Namespace) -> Costs:
    times = (args.forward, args.backward_input, args.backward_weight, args.p2p)
    if not any(times[:3]):
        raise ValueError("--forward, --backward-input and --backward-weight are all 0: there is nothing to draw.")
    costs = Costs(*times, optimizer=args.optimizer, exchange=args.exchange)
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
) -> Plan:
    check_size(pp_size, num_microbatches, find_schedule(schedule).check(pp_size, num_chunks), num_slices)
    return make_plan(schedule, pp_size, num_microbatches, num_chunks, num_slices=num_slices, settings=settings)
