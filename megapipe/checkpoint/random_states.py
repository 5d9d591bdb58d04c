"""Random states by a rank's place: its stage and its replica.

Ranks with one place, those of a tensor-parallel group, hold parts of the same layers and must draw the same numbers, in
whatever arrangement a run goes on. So the place says whose state a rank goes on with, and not its number.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .. import parallel_state

Place = Sequence[int]
"""A rank's pipeline rank, and the number of its replica."""


def own_place(rank: int) -> Place:
    """This rank's. Where no groups say so, each rank has a place of its own."""
    if not parallel_state.model_parallel_is_initialized():
        return [0, rank]
    return [parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()]


def find_state(rank: int, places: Sequence[Place], saved: Sequence[Place]) -> int | None:
    """The rank whose saved state this rank goes on with: of those with its place the one with its number among them, or
    where there were more or fewer the first. None where places have come or gone.

    Args:
        places: of all ranks, as they are now.
        saved: as they were.
    """
    if {*map(tuple, places)} != {*map(tuple, saved)}:
        return None
    now, then = ([one for one, place in enumerate(of) if place == places[rank]] for of in (places, saved))
    return then[now.index(rank) if len(now) == len(then) else 0]


def seed_of(rank: int, places: Sequence[Place], seed: int, step: int) -> int:
    """A seed of its own for each place and each step of a run."""
    different = sorted({*map(tuple, places)})
    return seed + 1_000_003 * step + different.index(tuple(places[rank]))  # larger than any number of places


def random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # or asking takes a GPU
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


def seed_random(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
