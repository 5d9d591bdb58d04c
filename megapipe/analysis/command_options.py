"""What subcommands make of their options, and what they refuse."""

from __future__ import annotations

import argparse
import math
import re
import runpy
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ..plan import (
    Costs,
    Plan,
    Schedule,
    Settings,
    Simulation,
    StageBytes,
    find_schedule,
    load_stage_bytes,
    make_plan,
    schedule_names,
)
from .text import PREFIXES, bytes_in_words

LARGEST = 1_000_000
"""The most forwards in a plan: ranks x microbatches x chunks x slices. That many take minutes and some GB."""


def import_schedule(name: str) -> str:
    """The name of a schedule; of FILE.py:NAME, that of the one that the file has registered.

    Raises:
        ValueError: the file has none of that name.
    """
    file, colon, wanted = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return name
    if not Path(file).is_file():
        raise ValueError(f"there is no file {file}: give FILE.py:NAME, of a file with functions under @schedule.")
    if (folder := str(Path(file).parent)) not in sys.path:
        sys.path.append(folder)  # what lies beside a script can be imported
    try:
        names = runpy.run_path(file)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{file} ends with {type(error).__name__}: {error}") from error
    found = names.get(wanted)
    known = found.name if isinstance(found, Schedule) else wanted
    if known not in schedule_names():
        every = [one for one in names.values() if isinstance(one, Schedule)]
        made = sorted(one.name for one in every if one.loops.__module__ == names["__name__"])  # others are imported
        raise ValueError(f"{file} has no schedule {wanted!r}: it has {', '.join(made) or 'none'} under @schedule.")
    return known


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        min_pending_weights=args.min_pending_weights or 0, recompute=args.recompute is not None, offload=args.offload
    )


def recompute_time(args: argparse.Namespace) -> float | None:
    """None for that of F."""
    return None if args.recompute is None or math.isnan(args.recompute) else args.recompute


def speeds_of(texts: Sequence[str] | None) -> list[float] | None:
    if texts is None:
        return None
    try:
        return list(map(float, texts))
    except ValueError:
        raise ValueError(
            f"--speeds are numbers, one for each rank, such as 1,1,.5,.5, got {','.join(texts)}."
        ) from None


def costs_of(args: argparse.Namespace) -> Costs:
    if not any(args.times):
        raise ValueError("--times are all 0: there is nothing to draw.")
    forward, inputs, weights = args.times
    costs = Costs(
        forward,
        inputs,
        weights,
        args.p2p,
        exchange=args.exchange,
        recompute=recompute_time(args),
        memory=bytes_of(args),
        speeds=speeds_of(args.speeds),
    )
    return unsplit(costs) if args.unsplit else costs


def bytes_of(args: argparse.Namespace) -> StageBytes | None:
    """Those of the stages; None where they are not given."""
    return None if args.bytes is None else load_stage_bytes(args.bytes)


def unsplit(costs: Costs) -> Costs:
    """The costs of layers that compute their weight gradients in B."""
    both = costs.backward_input, costs.backward_weight
    if all(isinstance(cost, (int, float)) for cost in both):
        return replace(costs, backward_input=sum(both), backward_weight=0.0)  # type: ignore[arg-type]
    inputs, weights = (list(cost) for cost in both if isinstance(cost, Sequence))
    return replace(costs, backward_input=[b + w for b, w in zip(inputs, weights)], backward_weight=[0.0] * len(inputs))


class Memory(NamedTuple):
    """What is counted of a simulation, and how much of it a rank may hold.

    Attributes:
        in_bytes: bytes of the fullest rank; otherwise microbatches of a whole rank, as `Simulation.peak_activations`.
        limit: one for each rank, or one for all; None for none.
    """

    in_bytes: bool = False
    limit: Sequence[float] | None = None

    def of(self, simulation: Simulation) -> float:
        """The most that a rank holds."""
        return max(simulation.peak_bytes if self.in_bytes else simulation.peak_activations)

    def fits(self, simulation: Simulation) -> bool:
        held = simulation.peak_bytes if self.in_bytes else simulation.peak_activations
        limits = self.limit if self.limit is None or len(self.limit) > 1 else [*self.limit] * len(held)
        if limits is not None and len(limits) != len(held):
            raise ValueError(f"a memory limit is one number, or one for each of {len(held)} ranks, got {len(limits)}.")
        return limits is None or all(own <= most for own, most in zip(held, limits))

    def in_words(self, amount: float) -> str:
        return bytes_in_words(amount) if self.in_bytes else f"{amount:.3g}"

    @property
    def limit_in_words(self) -> str:
        return ", ".join(map(self.in_words, self.limit or ()))


def memory_of(args: argparse.Namespace, known: StageBytes | None) -> Memory:
    """What is counted, and the limit. One in microbatches is for these, one with a unit for bytes."""
    if args.memory_limit is None:
        return Memory(in_bytes=known is not None)
    try:
        numbers = list(map(float, args.memory_limit))
    except ValueError:
        if known is None:
            raise ValueError(
                f"--memory-limit {','.join(args.memory_limit)} is in bytes, and those of the stages are not known: "
                "give --bytes, or a number of microbatches."
            ) from None
        return Memory(True, list(map(parse_bytes, args.memory_limit)))
    if not all(number > 0 for number in numbers):
        raise ValueError(f"--memory-limit is a number of microbatches, got {','.join(args.memory_limit)}.")
    return Memory(False, numbers)


def parse_bytes(text: str) -> float:
    """The bytes of a size such as 80GB, 1.5 GiB or 4096.

    Raises:
        ValueError: it is none.
    """
    found = re.fullmatch(rf"\s*([0-9.]+(?:e[0-9]+)?)\s*([{PREFIXES}K]?)(i?)B?\s*", text, flags=re.IGNORECASE)
    try:
        number = float(found[1]) if found else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or found is None:
        raise ValueError(f"{text!r} is no size in bytes: write one such as 80GB, 1.5GiB or 4096.")
    power = "".join(PREFIXES).upper().index(found[2].upper()) + 1 if found[2] else 0
    return float(number * (1024 if found[3] else 1000) ** power)


def check_size(*sizes: int) -> None:
    if math.prod(sizes) > LARGEST:
        raise ValueError(
            f"{' x '.join(map(str, sizes))} forwards (ranks, microbatches, chunks, slices) take too long to look at: "
            f"choose sizes of which the product is at most {LARGEST:,}."
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
    num_slices: int,
    settings: Settings,
    costs: Costs,
) -> Plan:
    check_size(pp_size, num_microbatches, find_schedule(schedule).check(pp_size, num_chunks), num_slices)
    sizes = (pp_size, num_microbatches, num_chunks)
    return make_plan(schedule, *sizes, num_slices=num_slices, settings=settings, costs=costs)
