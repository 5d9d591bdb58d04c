"""Which rank holds which stage.

A model is cut into stages, numbered along the forward direction over the whole pipeline. A rank holds one stage per
*chunk*, its local number. A placement is one permutation of the ranks per chunk; everything else follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class StageInfo:
    """One stage of the pipeline: its number along the forward direction, and how many stages there are."""

    index: int
    num_stages: int

    @cached_property
    def is_first(self) -> bool:
        """It takes the model's input."""
        return self.index == 0

    @cached_property
    def is_last(self) -> bool:
        """It computes the loss."""
        return self.index == self.num_stages - 1


@dataclass(frozen=True)
class Placement:
    """How chunks are laid over ranks.

    `position(rank, chunk, pp_size)` is the place of `rank` in the row of stages that the chunk makes up.
    `inverse(place, chunk, pp_size)` is the rank at a place; None where the position is its own inverse.
    """

    name: str
    position: Callable[[int, int, int], int]
    inverse: Callable[[int, int, int], int] | None = None

    def stage(self, rank: int, chunk: int, pp_size: int) -> int:
        """The number of the stage that is this chunk of this rank."""
        return chunk * pp_size + self.position(rank, chunk, pp_size)

    def rank(self, stage: int, pp_size: int) -> int:
        """The rank that holds a stage."""
        chunk, place = divmod(stage, pp_size)
        return (self.inverse or self.position)(place, chunk, pp_size)

    def stages(self, rank: int, pp_size: int, num_chunks: int) -> list[StageInfo]:
        """The stages of `rank`, one per chunk, in the order of the `model` argument."""
        return [StageInfo(self.stage(rank, chunk, pp_size), num_chunks * pp_size) for chunk in range(num_chunks)]


# 0 1 2 3 | 4 5 6 7: each chunk runs over the ranks in order, and the last rank is followed by the first.
loop = Placement("loop", lambda rank, chunk, pp_size: rank)

# 0 1 2 3 | 7 6 5 4: every other chunk runs backwards, so that first and last stage share a rank.
v_shape = Placement("v", lambda rank, chunk, pp_size: pp_size - 1 - rank if chunk % 2 else rank)
