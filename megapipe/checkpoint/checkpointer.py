"""Checkpoints: saved under one arrangement of stages and replicas, and gone on with under any other.

    checkpointer = Checkpointer("checkpoints", chunks, optimizer, others={"lr_scheduler": scheduler}, keep_last=3)
    if (loaded := checkpointer.load(may_be_empty=True)) is not None:
        first_step, position = loaded
    ...
    checkpointer.save(step, data={"consumed_samples": consumed})

The idea: everything is saved under the name of its parameter in the whole model (see `whole_state`), and appears at
once or not at all (see `checkpoint_files`). Ranks agree on every step of it over a group of their own: an error on one
is the same error on all, and a save in the background disturbs no other communication.
"""

from __future__ import annotations

import errno
import os
import pickle
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim.lr_scheduler import LRScheduler

from .. import parallel_state
from ..chunks import as_list, find_attribute
from ..training import PostValidatedOptimizer, load_scheduler
from .alike import check_alike, fingerprint
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
from .folder_lock import FolderLock, lock_folder
from .full_state import GlobalName, Parts, WholeState
from .shared_names import Use, check_tied, find_shared, sum_up, uses_of

__all__ = ["Checkpointer", "Loaded", "Stateful", "latest_checkpoint", "read_position"]

T = TypeVar("T")
V = TypeVar("V")


class Stateful(Protocol):
    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Loaded(NamedTuple):
    step: int
    data: Any
    """What was passed to `save` as `data`."""


def read_position(path: str | os.PathLike[str]) -> Loaded:
    """Step and data of a checkpoint, or of the latest in a run's folder. Any process may ask, without other ranks.

    Raises ValueError where there is none.
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
            shape, so that they can be shared out otherwise when loaded.

    Raises ValueError where `keep_last` is below 1.
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
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, data: Any = None) -> None:
        """Save what there is after `step` steps.

        Args:
            data: the position in the data, or whatever else is to come back: numbers, strings, lists, dicts, tensors.
                Rank 0's is saved.

        Raises, on every rank: ValueError where the folder holds this or a later step, where another run saves there,
        where ranks do not reach the same folder or have something else in common that differs, or where chunks use one
        name for different parameters; TypeError where something could not be read back without executing code;
        RuntimeError where writing fails, of this save or of the last one in the background.
        """
        tensors: dict[str, Tensor] = {}
        common: dict[str, Any] = {}

        def collect() -> dict[str, Any]:
            state = self._whole_state()
            tensors.update(state.tensors())
            tensors[f"rng.{self._rank}"] = serialise(_random_states(), "the random state")
            common["others"] = {name: other.state_dict() for name, other in self._others.items()}
            common["extras"] = state.extras()
            uses = uses_of(state, self._pp_rank, self._rank) if not self._names_are_checked else []
            return {
                "step": step,
                "alike": _fingerprints(**common) if self._world_size > 1 else {},
                "options": state.options(),
                "numbers": state.numbers(),
                "aliases": state.aliases,
                "uses": uses,
            }

        def prepare(ranks: list[dict[str, Any]]) -> tuple[set[str], str]:
            self._claim([rank["step"] for rank in ranks])
            what = "what is passed to save, or the state of others or of the optimizer,"
            tensors["run"] = serialise({**self._run_of(step, data, ranks), **common}, what)
            check_alike([rank["alike"] for rank in ranks])
            shared = find_shared(rank["uses"] for rank in ranks)
            return shared, begin_checkpoint(self._folder, step).name

        shared, name = self._agree(collect, prepare)
        writers: list[Writer] = []

        def get_ready() -> list[Use]:
            writers.append(Writer(self._folder / name, self._keep_last))
            sums = sum_up(self._whole_state(), shared, self._pp_rank, self._rank) if shared else []
            if self._asynchronous:
                tensors.update({key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()})
            return sums

        self._agree(get_ready, check_tied)
        self._names_are_checked = True
        self._write(writers[0], tensors)

    def check_can_save(self, step: int) -> None:
        """Raises ValueError, on every rank, where the folder holds a checkpoint of `step` or later, from which a
        restart would go on, or where another run saves there. For the beginning of a run, rather than after hours."""
        self._agree(lambda: step, self._claim)

    def wait(self) -> None:
        """Until the save in the background is on the disk. Raises RuntimeError, on every rank, where it failed."""
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

        Raises, on every rank: ValueError where there is no checkpoint, or one of another model, or one that is damaged
        or would execute code.
        """
        start = self._folder if path is None else Path(path)
        found = self._agree(
            lambda: None,
            lambda _: None if may_be_empty and not holds_checkpoint(start) else find_checkpoint(start),
        )
        if found is None:
            return None
        opened: list[tuple[Reader, WholeState, dict[str, Any]]] = []

        def open_checkpoint() -> tuple[set[str], set[str]]:
            reader, state = Reader(found), self._whole_state()
            run = reader.read_value("run")
            if missing := self._others.keys() - run["others"].keys():
                raise ValueError(
                    f"the checkpoint {found} has no state of {sorted(missing)}, only of {sorted(run['others'])}: pass "
                    "the others under the names they were saved with."
                )
            opened.append((reader, state, run))
            return set(reader.contents), state.keys(reader, run["aliases"])

        self._agree(open_checkpoint, lambda ranks: _check_all_used(found, ranks))
        reader, state, run = opened[0]
        is_training, fits = bool(self._optimizers), run["world_size"] == self._world_size

        def read() -> None:
            state.load_model(reader, run["aliases"])
            if is_training:
                state.load_optimizers(reader, run["aliases"], run["options"], run["numbers"], run.get("extras", []))
            for name, other in self._others.items():
                if isinstance(other, LRScheduler):
                    load_scheduler(other, run["others"][name])
                else:
                    other.load_state_dict(run["others"][name])
            if is_training and fits:
                _set_random_states(reader.read_value(f"rng.{self._rank}"))
            elif is_training:
                _seed(run["seed"] + 1_000_003 * run["step"] + self._rank)

        self._agree(read, lambda _: None)
        if is_training and not fits and self._rank == 0:
            warnings.warn(
                f"{found} was saved by {run['world_size']} ranks and is loaded by {self._world_size}: their random "
                f"states do not fit and are seeded anew, from the seed {run['seed']}, step {run['step']} and the rank.",
                stacklevel=2,
            )
        return Loaded(run["step"], run["data"])

    # What this rank has

    @property
    def _rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    @property
    def _world_size(self) -> int:
        return 1 if self._group is None else self._group.size()

    @property
    def _pp_rank(self) -> int:
        return parallel_state.get_pipeline_model_parallel_rank()

    def _whole_state(self) -> WholeState:
        configs = (find_attribute(chunk, "config") for chunk in self._chunks)
        training = (getattr(config, "post_validated_optimizer", None) for config in configs)
        for optimizer in (*self._optimizers, *training):  # whether or not it is to be saved
            if isinstance(optimizer, PostValidatedOptimizer):
                optimizer.finalize_everywhere()
        return WholeState(self._chunks, self._optimizers, *self._naming)

    def _run_of(self, step: int, data: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds besides tensors by name. Replicas hand in the same parameter groups."""
        groups = {repr(group): group for rank in ranks for group in rank["options"]}
        return {
            "step": step,
            "data": data,
            "options": list(groups.values()),
            "numbers": {name: numbers for rank in ranks for name, numbers in rank["numbers"].items()},
            "aliases": {name: first for rank in ranks for name, first in rank["aliases"].items()},
            "world_size": self._world_size,
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

    # Together

    def _agree(self, work: Callable[[], T], decide: Callable[[list[T]], V]) -> V:
        """What rank 0 decides on what `work` returned on every rank. What anybody raises is raised on every rank.

        A save in the background, which uses the same group, is waited for.
        """
        self.wait()
        mine: T | Exception
        try:
            mine = work()
        except Exception as error:
            mine = error
        mine = _sendable(mine)
        everybody: list[Any] = [mine] * self._world_size
        verdict: list[Any] = [None]
        if self._group is not None:
            dist.gather_object(mine, everybody if self._rank == 0 else None, dst=0, group=self._group)
        if self._rank == 0:
            try:
                failed = [value for value in everybody if isinstance(value, Exception)]
                verdict = [failed[0] if failed else decide(everybody)]
            except Exception as error:
                verdict = [_sendable(error)]
        if self._group is not None:
            dist.broadcast_object_list(verdict, src=0, group=self._group)
        if isinstance(verdict[0], Exception):
            raise verdict[0]
        return verdict[0]  # type: ignore[no-any-return]

    def _write(self, writer: Writer, tensors: dict[str, Tensor]) -> None:
        planner = DefaultSavePlanner(flatten_state_dict=False)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is ")  # one process needs no process group
            if self._asynchronous:
                self._pending = cast(
                    "Future[Any]",
                    async_save(tensors, storage_writer=writer, planner=planner, process_group=self._group),
                )
                return
            try:
                save(tensors, storage_writer=writer, planner=planner, process_group=self._group)
            except CheckpointException as error:
                raise _failed_to_save(self._folder, error) from None


def _sendable(value: T | Exception) -> T | Exception:
    """The same, or an error that says why it cannot be sent: all ranks must hear of it, or they wait forever."""
    try:
        data = pickle.dumps(value)
        if isinstance(value, Exception):
            pickle.loads(data)
    except Exception as error:
        if isinstance(value, Exception):
            return RuntimeError(f"{type(value).__name__}: {value}")
        return TypeError(
            f"what is to be saved cannot be sent to the other ranks ({error}): keep numbers, strings, lists, dicts and "
            "tensors in the optimizer's groups and state."
        )
    return value


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


def _check_all_used(path: Path, ranks: list[tuple[set[str], set[str]]]) -> None:
    there = {key for key in ranks[0][0] if key.startswith("model.")}
    if left := there.difference(*(used for _, used in ranks)):
        raise ValueError(
            f"the checkpoint {path} has {len(left)} entries that no rank's chunks have, such as {min(left)}: it is of "
            "another model, or the chunks count their layers from 0 and need global_name."
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


# Random states


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = (kind, keys.tolist(), *rest)
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])


def _seed(seed: int) -> None:
    torch.manual_seed(seed % 2**63)
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
