"""Where in a run a checkpoint was saved."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

from .files import Reader, find_checkpoint

__all__ = ["Loaded", "read_position"]


class Loaded(NamedTuple):
    """The position in a run.

    Attributes:
        step: the number of steps before the save.
        data: as it was passed to `save`.
    """

    step: int
    data: Any


def read_position(path: str | os.PathLike[str]) -> Loaded:
    """Step and data of a checkpoint, or of the latest in a run's folder. Any process may ask, without other ranks.

    Raises:
        ValueError: where there is none.
    """
    run = Reader(find_checkpoint(path)).read_value("run")
    return Loaded(run["step"], run["data"])
