"""How much memory schedules take beside each other: in bytes where those are known, else in microbatches."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from ..plan import Plan, Simulation

__all__ = ["Memory", "bytes_in_words", "front_of", "parse_bytes"]

PREFIXES = "kMGTP"


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


def bytes_in_words(number: float) -> str:
    """Bytes in the largest unit of which there is one at least: 35.3 GB."""
    power = 0
    while number >= 999.5 and power < len(PREFIXES):
        number, power = number / 1000, power + 1
    return f"{number:.3g} {PREFIXES[power - 1] if power else ''}B"
