"""Checkpoints: saved under one arrangement of stages and replicas, and gone on with under any other.

    checkpointer = Checkpointer("checkpoints", chunks, optimizer, others={"lr_scheduler": scheduler}, keep_last=3)
    if (loaded := checkpointer.load(may_be_empty=True)) is not None:
        first_step, position = loaded
    ...
    checkpointer.save(step, data={"consumed_samples": consumed})

The idea: everything is saved under the name of its parameter in the whole model (see `full_state`), and appears at
once or not at all (see `files`). Ranks agree on every step of it over a group of their own (see `agreement`): an error
on one is the same error on all, and a save in the background disturbs no other communication.
"""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim.lr_scheduler import LRScheduler

from .. import parallel_state
from ..chunks import as_list, find_attribute
from ..training import PostValidatedOptimizer, load_scheduler
from .agreement import Agreement
from .files import (
    Reader,
    Writer,
    begin_checkpoint,
    checkpoints_in,
    find_checkpoint,
    holds_checkpoint,
    latest_checkpoint,
    remove_incomplete,
    serialise,
)
from .fingerprints import check_same, fingerprint
from .folder_lock import FolderLock, lock_folder
from .full_state import FullState, GlobalName, Parts
from .random_states import random_states, seed_random, set_random_states
from .shared_names import check_tied, checksums_of, find_shared, uses_of

__all__ = ["Checkpointer", "Loaded", "Stateful", "latest_checkpoint", "read_position"]


class Stateful(Protocol):
    """An object with a state, as torch has many."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


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


class Checkpointer:
    """Saves and loads model, optimizer, others, random states and the position in the data. Every rank makes one and
    calls its methods alike.

    Args:
        folder: of the run, which all ranks can reach. Each checkpoint is a folder `step_00000100` in it. The first
            save locks it, until the checkpointer is forgotten or the process ends: no other run can save there.
        chunks: this rank's, in the order of `stages_for_rank`. The names of their parameters and buffers, with
            `state_dict()`, must be those of the whole model: a chunk that begins at layer 4 calls it layer 4. Two
            stages that use the same name have a tied parameter there.
        optimizer: any torch optimizer over their parameters, several in a list, or an object that has them as
            `optimizers`. None saves and loads the model without.
        others: what else has `state_dict()` and `load_state_dict()`, by a name of yours: LR scheduler, GradScaler.
            Rank 0's is saved, and loaded on every rank; so all must have the same.
        keep_last: how many checkpoints to keep; None for all.
        asynchronous: `save` returns when everything is copied to the host's memory and writes in the background. The
            next `save` waits for it first; call `wait` before the process ends.
        global_name: for chunks that number their layers from 0: `global_name(chunk, name)` is the whole model's name
            for what the chunk calls `name`.
        parts: for parameters that hold a share of something numbered, such as a rank's experts:
            `parts(name, parameter, tensor)` yields named views of `tensor`, which is the parameter or a tensor of its
            shape, so that they can be distributed otherwise when loaded.

    Raises:
        ValueError: where `keep_last` is below 1.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        chunks: nn.Module | Sequence[nn.Module],
        optimizer: Any = None,
        *,
        others: Mapping[str, Stateful] | None = None,
        keep_last: int | None = None,
        asynchronous: bool = False,
        global_name: GlobalName | None = None,
        parts: Parts | None = None,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would leave no checkpoint: keep at least 1, or None for all.")
        self._folder = Path(folder)
        self._chunks = as_list(chunks)
        self._optimizers = _optimizers_of(optimizer)
        self._others = dict(others or {})
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._naming = (global_name, parts)
        self._names_are_checked = False
        self._pending: Future[Any] | None = None
        self._lock: FolderLock | None = None  # rank 0's
        self._agreement = Agreement()

    def save(self, step: int, data: Any = None) -> None:
        """Save what there is after `step` steps.

        Args:
            data: the position in the data, or anything else to be loaded again: numbers, strings, lists, dicts,
                tensors. Rank 0's is saved.

        Raises:
            ValueError: where the folder holds this or a later step, where another run saves there, where ranks do not
                reach the same folder or have something else in common that differs, or where chunks use one name for
                different parameters. All errors are raised on every rank.
            TypeError: where something could not be read back without executing code.
            RuntimeError: where writing fails, of this save or of the last one in the background.
        """
        self.wait()
        agreement = self._agreement
        with agreement.same_errors():
            state = self._full_state()
            tensors = state.tensors()
            tensors[f"rng.{agreement.rank}"] = serialise(random_states(), "the random state")
            common: dict[str, Any] = {"others": {name: other.state_dict() for name, other in self._others.items()}}
            common["extras"] = state.extras()
            own = self._own(step, state, common)
        ranks = agreement.gather(own)
        shared: set[str] = set()
        name = ""
        with agreement.same_errors():
            if agreement.rank == 0:
                self._claim([rank["step"] for rank in ranks])
                what = "what is passed to save, or the state of others or of the optimizer,"
                tensors["run"] = serialise({**self._run_of(step, data, ranks), **common}, what)
                check_same([rank["fingerprints"] for rank in ranks])
                shared = find_shared(rank["uses"] for rank in ranks)
                name = begin_checkpoint(self._folder, step).name
        shared, name = agreement.broadcast((shared, name))
        with agreement.same_errors():
            writer = Writer(self._folder / name, self._keep_last)
            checksums = checksums_of(state, shared, self._pp_rank, agreement.rank) if shared else []
            if self._asynchronous:
                tensors = {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
        checksums_of_ranks = agreement.gather(checksums)
        with agreement.same_errors():
            check_tied(checksums_of_ranks)
        self._names_are_checked = True
        self._write(writer, tensors)

    def check_can_save(self, step: int) -> None:
        """Check the folder at the beginning of a run, rather than after hours.

        Raises:
            ValueError: on every rank, where the folder holds a checkpoint of `step` or later, from which a restart
                would go on, or where another run saves there.
        """
        self.wait()
        steps = self._agreement.gather(step)
        with self._agreement.same_errors():
            if steps:
                self._claim(steps)

    def wait(self) -> None:
        """Wait until the save in the background is on the disk.

        Raises:
            RuntimeError: on every rank, where it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            try:
                pending.result()
            except CheckpointException as error:
                raise _failed_to_save(self._folder, error) from None

    def load(self, path: str | os.PathLike[str] | None = None, *, may_be_empty: bool = False) -> Loaded | None:
        """Load everything there was when it was saved, into the chunks, optimizer and others as they are.

        To go on training, with an optimizer, the random states are those of then too. Where there were more ranks or
        fewer, they are seeded from the run's seed, the step and the rank, and rank 0 says so by a warning.

        Args:
            path: a run's folder, whose latest checkpoint is taken, or one checkpoint; None for the run's own folder.
            may_be_empty: return None where there is no checkpoint, instead of an error: the first start of a run.

        Returns:
            The step and `data` of the save; None where there was no checkpoint and `may_be_empty` is set.

        Raises:
            ValueError: on every rank, where there is no checkpoint, or one of another model, or one that is damaged or
                would execute code.
        """
        self.wait()
        agreement = self._agreement
        start = self._folder if path is None else Path(path)
        found: Path | None = None
        with agreement.same_errors():
            if agreement.rank == 0 and (holds_checkpoint(start) or not may_be_empty):
                found = find_checkpoint(start)
        found = agreement.broadcast(found)
        if found is None:
            return None
        with agreement.same_errors():
            reader, state = Reader(found), self._full_state()
            run = reader.read_value("run")
            if missing := self._others.keys() - run["others"].keys():
                raise ValueError(
                    f"the checkpoint {found} has no state of {sorted(missing)}, only of {sorted(run['others'])}: pass "
                    "the others under the names they were saved with."
                )
            used = state.keys(reader, run["aliases"])
        ranks = agreement.gather(used)
        with agreement.same_errors():
            if agreement.rank == 0:
                _check_all_used(reader, ranks)
        with agreement.same_errors():
            self._restore(reader, state, run)
        is_training, fits = bool(self._optimizers), run["world_size"] == agreement.num_ranks
        if is_training and not fits and agreement.rank == 0:
            warnings.warn(
                f"{found} was saved by {run['world_size']} ranks and is loaded by {agreement.num_ranks}: their random "
                f"states do not fit and are seeded anew, from the seed {run['seed']}, step {run['step']} and the rank.",
                stacklevel=2,
            )
        return Loaded(run["step"], run["data"])

    @property
    def _pp_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    def _full_state(self) -> FullState:
        configs = (find_attribute(chunk, "config") for chunk in self._chunks)
        training = (getattr(config, "post_validated_optimizer", None) for config in configs)
        for optimizer in (*self._optimizers, *training):  # whether or not it is to be saved
            if isinstance(optimizer, PostValidatedOptimizer):
                optimizer.finalize_everywhere()
        return FullState(self._chunks, self._optimizers, *self._naming)

    def _restore(self, reader: Reader, state: FullState, run: dict[str, Any]) -> None:
        """Load chunks, optimizers, others and random states."""
        state.load_model(reader, run["aliases"])
        if self._optimizers:
            state.load_optimizers(reader, run)
        for name, other in self._others.items():
            if isinstance(other, LRScheduler):
                load_scheduler(other, run["others"][name])
            else:
                other.load_state_dict(run["others"][name])
        if self._optimizers:
            rank, num_ranks = self._agreement.rank, self._agreement.num_ranks
            if run["world_size"] == num_ranks:
                set_random_states(reader.read_value(f"rng.{rank}"))
            else:
                seed_random(run["seed"] + 1_000_003 * run["step"] + rank)  # larger than any rank

    def _own(self, step: int, state: FullState, common: dict[str, Any]) -> dict[str, Any]:
        """What rank 0 needs from this rank to save."""
        rank, is_alone = self._agreement.rank, self._agreement.num_ranks == 1
        return {
            "step": step,
            "fingerprints": {} if is_alone else _fingerprints(**common),
            "options": state.options(),
            "numbers": state.numbers(),
            "aliases": state.aliases,
            "uses": [] if self._names_are_checked else uses_of(state, self._pp_rank, rank),
        }

    def _run_of(self, step: int, data: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds besides tensors by name. Replicas hand in the same parameter groups."""
        groups = {repr(group): group for rank in ranks for group in rank["options"]}
        return {
            "step": step,
            "data": data,
            "options": list(groups.values()),
            "numbers": {name: numbers for rank in ranks for name, numbers in rank["numbers"].items()},
            "aliases": {name: first for rank in ranks for name, first in rank["aliases"].items()},
            "world_size": self._agreement.num_ranks,
            "seed": torch.initial_seed(),
        }

    def _claim(self, steps: list[int]) -> None:
        """On rank 0: the folder is this run's, and all may save this step to it."""
        step = steps[0]
        if (other := next((rank for rank, one in enumerate(steps) if one != step), None)) is not None:
            raise ValueError(
                f"rank 0 saves step {step} and rank {other} step {steps[other]}: save the same one on all."
            )
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"a step is a whole number from 0 on, got {step!r}.")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = lock_folder(self._folder)
        newest = next(reversed(checkpoints_in(self._folder)), -1)
        if newest >= step:
            raise ValueError(
                f"{self._folder} holds a checkpoint of step {newest}, from which a restart would go on rather than "
                f"from step {step}: load that one, move it away, or save to another folder."
            )
        if self._lock.is_held:
            remove_incomplete(self._folder)

    def _write(self, writer: Writer, tensors: dict[str, Tensor]) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")  # one process needs no process group
            if self._asynchronous:
                self._pending = cast(
                    "Future[Any]",
                    async_save(tensors, storage_writer=writer, planner=planner, process_group=self._agreement.group),
                )
                return
            try:
                save(tensors, storage_writer=writer, planner=planner, process_group=self._agreement.group)
            except CheckpointException as error:
                raise _failed_to_save(self._folder, error) from None


def _optimizers_of(optimizer: Any) -> list[torch.optim.Optimizer]:
    if optimizer is None:
        return []
    several = (
        [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else getattr(optimizer, "optimizers", optimizer)
    )
    optimizers = list(several) if isinstance(several, (list, tuple)) else [several]
    for found in optimizers:
        if not isinstance(found, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch optimizer, or several, got a {type(found).__name__}.")
    return optimizers


def _check_all_used(reader: Reader, ranks: list[set[str]]) -> None:
    there = {key for key in reader.contents if key.startswith("model.")}
    if left := there.difference(*ranks):
        raise ValueError(
            f"the checkpoint {reader.path} has {len(left)} entries that no rank's chunks have, such as {min(left)}: it "
            "is of another model, or the chunks count their layers from 0 and need global_name."
        )


def _failed_to_save(folder: Path, error: CheckpointException) -> RuntimeError:
    rank, (failure, _) = next(iter(error.failures.items()))
    is_full = isinstance(failure, OSError) and failure.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = (
        " The disk, or what you may use of it, is full: make room, or keep fewer with keep_last." if is_full else ""
    )
    return RuntimeError(
        f"saving to {folder} failed on rank {rank} ({failure}). What was saved before is untouched.{remedy}"
    )


def _fingerprints(others: dict[str, Any], extras: list[dict[str, Any]]) -> dict[str, int]:
    """Of all of which rank 0's is loaded on every rank."""
    values = {f"the state of others[{name!r}]": state for name, state in others.items()}
    for number, extra in enumerate(extras):
        values[f"what optimizer {number} has besides the state of its parameters"] = extra
    return {name: fingerprint(value) for name, value in values.items()}
