"""An optimizer's state without the model, for those who save the model in another form."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .checkpointer import Checkpointer, Stateful
from .files import begin_checkpoint, remove_incomplete


def save_optimizer(
    folder: str | os.PathLike[str],
    chunks: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    others: Mapping[str, Stateful] | None = None,
) -> None:
    """Save what an optimizer keeps for its parameters and its groups, under the names of the whole model. Every rank
    calls it.

    The weights are not in it: `save_pretrained` of Hugging Face's chunks has written them, for instance. What the
    folder held before is replaced once all is on the disk.

    Args:
        folder: of this state alone, which all ranks can reach.
        chunks: this rank's, whose parameters the optimizer trains.
        optimizer: any torch optimizer over them, or several in a list.
        others: what else has `state_dict()` and `load_state_dict()`, by a name of yours. Rank 0's is saved.

    Raises:
        ValueError: on every rank, where ranks do not reach the same folder, or have other `others`.
        RuntimeError: on every rank, where writing fails.
    """
    with _OptimizerAlone(Path(folder).absolute(), chunks, optimizer, others) as checkpointer:
        checkpointer.save(0)


def load_optimizer(
    folder: str | os.PathLike[str],
    chunks: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    others: Mapping[str, Stateful] | None = None,
) -> None:
    """Load what `save_optimizer` has saved, under any arrangement of stages and replicas. Every rank calls it, and
    passes what it is to be loaded into, as to `save_optimizer`. Random states stay as they are.

    Raises:
        ValueError: on every rank, where the folder holds no such state, or that of another model, or a damaged one.
            Nothing has been changed then.
    """
    with _OptimizerAlone(Path(folder).absolute(), chunks, optimizer, others) as checkpointer:
        checkpointer.load(folder)


class _OptimizerAlone(Checkpointer):
    """Saves one checkpoint, which belongs to no run: its folder is not locked, and it has no step."""

    _is_of_run = False

    def __init__(self, path: Path, chunks: Any, optimizer: Any, others: Mapping[str, Stateful] | None) -> None:
        super().__init__(path.parent, chunks, optimizer, others=others)
        self._name = path.name

    def _claim(self, step: int) -> int:
        if self._ranks.rank == 0:
            self._folder.mkdir(parents=True, exist_ok=True)
        return step

    def _begin(self, step: int) -> Path:
        remove_incomplete(self._folder, re.escape(self._name))
        return begin_checkpoint(self._folder / self._name)
