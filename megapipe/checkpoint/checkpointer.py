"""Checkpoints: saved under one arrangement of stages and replicas, and gone on with under any other.

    checkpointer = Checkpointer("checkpoints", chunks, optimizer, others={"lr_scheduler": scheduler}, keep_last=3)
    if (loaded := checkpointer.load(may_be_empty=True)) is not None:
        first_step, position = loaded
    ...
    checkpointer.save(step, data={"consumed_samples": consumed})

The idea: everything is saved under the name of its parameter in the whole model (see `full_state`), and appears at
once or not at all (see `files`). Ranks agree on every step of it over a group of their own (see `AllRanks`): an error
on one is the same error on all.
"""

from __future__ import annotations

import base64
import itertools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..all_ranks import AllRanks
from ..chunks import as_list
from ..training import finalize_weights, load_scheduler
from .files import (
    EXCHANGE,
    UNDER_WAY,
    Writer,
    begin_checkpoint,
    checkpoints_in,
    find_checkpoints,
    name_of,
    remove_incomplete,
    set_aside,
    write_tensors,
)
from .fingerprints import (
    check_one_checkpoint,
    check_same,
    check_steps,
    check_tied,
    find_shared,
    fingerprints_of,
    uses_of,
)
from .folder_lock import lock_folder
from .full_state import FullState, GlobalName, Parts, check_all_used, optimizers_of
from .random_states import Place, find_state, own_place, random_states, seed_of, seed_random, set_random_states
from .reading import DamagedError, Loaded, Reader, deserialise, serialise


class Stateful(Protocol):
    """The Stateful of torch.distributed.checkpoint, which a module is not, since its `load_state_dict` returns
    something."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


class Checkpointer:
    """Saves and loads model, optimizer, others, random states and the position in the data. Every rank makes one and
    calls its methods alike.

    As a context manager it closes itself, which ends its process groups and the thread that writes.

    Args:
        folder: of the run, which all ranks can reach. Each checkpoint is a folder `step_00000100` in it. The first
            save locks it, until the process of rank 0 ends: no other run can save there.
        chunks: this rank's, in the order of `stages_for_rank`. The names of their parameters and buffers, with
            `state_dict()`, must be those of the whole model: a chunk that begins at layer 4 calls it layer 4. Two
            stages that use the same name have a tied parameter there.
        optimizer: any torch optimizer over their parameters, several in a list, or an object that has them as
            `optimizers`. None saves and loads the model without.
        others: what else has `state_dict()` and `load_state_dict()`, by a name of yours: LR scheduler, GradScaler.
            Rank 0's is saved, and loaded on every rank; so all must have the same.
        keep_last: how many checkpoints to keep; None for all.
        asynchronous: `save` returns when everything is copied to the host's memory and writes in the background. The
            next `save` waits for it first; call `wait` or `close` before the process ends.
        global_name: for chunks that number their layers from 0: `global_name(chunk, name)` is the whole model's name
            for what the chunk calls `name`.
        parts: for parameters that hold a share of something numbered, such as a rank's experts:
            `parts(name, parameter, tensor)` yields named views of `tensor`, which is the parameter or a tensor of its
            shape, so that they can be distributed otherwise when loaded.
        trained_only: leave out parameters without `requires_grad`, and the buffers of modules that have no others: for
            adapters on weights that are frozen, quantised ones for example, which the next run has before it loads. The
            optimizer may hold the frozen ones too.

    Raises:
        ValueError: where `keep_last` is below 1.
    """

    _is_of_run = True
    """It saves all that a run needs to go on; otherwise the optimizer alone, see `optimizer_alone`."""

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
        trained_only: bool = False,
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise ValueError(f"keep_last={keep_last} would leave no checkpoint: keep at least 1, or None for all.")
        self._folder = Path(folder)
        self._chunks = as_list(chunks)
        self._optimizers = optimizers_of(optimizer)
        self._others = dict(others or {})
        self._keep_last = keep_last
        self._asynchronous = asynchronous
        self._naming = (global_name, parts, trained_only)
        self._trained_only = trained_only
        self._uses: list[Any] = []  # by rank, the names that have been checked
        self._shared: set[str] = set()
        self._writing: Future[None] | None = None
        self._damaged: list[Path] = []  # checkpoints that `load` has passed over
        self._ranks = AllRanks(EXCHANGE)
        # What happens in the background has groups of its own, and disturbs no other communication.
        self._background = AllRanks(EXCHANGE) if asynchronous else self._ranks
        self._thread = ThreadPoolExecutor(1, "megapipe-checkpoint")
        self._is_closed = False

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for a save in the background, then end the thread that writes and the process groups. All ranks call it.
        The lock of the folder stays until the process ends. A second call does nothing.

        Raises:
            RuntimeError: on every rank, where that save failed. All has ended then, too.
        """
        try:
            if not self._is_closed:
                self.wait()
        finally:
            self._is_closed = True
            self._thread.shutdown()
            self._ranks.close()
            self._background.close()

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
        with self._ranks.together() as phase:
            state = self._full_state()
            tensors = state.tensors()
            if self._is_of_run:
                tensors[f"rng.{self._ranks.rank}"] = serialise(random_states(), "the random state")
            common: dict[str, Any] = {"others": {name: other.state_dict() for name, other in self._others.items()}}
            common["extras"] = state.extras()
            phase.own = self._own(step, state, common)
        ranks = phase.all
        with self._ranks.together() as phase:
            check_steps([rank["step"] for rank in ranks])
            check_same([rank["fingerprints"] for rank in ranks])
            uses, shared = [rank["uses"] for rank in ranks], self._shared
            if any(one is not None for one in uses):
                uses = [before if one is None else one for one, before in itertools.zip_longest(uses, self._uses)]
                shared = find_shared(use for one in uses for use in one)
            sums = uses_of(state, self._ranks.rank, shared) if shared else []
            name = ""
            if self._ranks.rank == 0:
                what = "what is passed to save, or the state of others or of the optimizer,"
                tensors["run"] = serialise({**self._run_of(step, data, ranks), **common}, what)
                name = self._begin(step).name
            phase.own = name, sums
        (name, _), *_ = phase.all
        with self._ranks.together():
            check_tied(use for _, sums in phase.all for use in sums)
            if None not in uses:
                self._uses, self._shared = uses, shared
            writer = Writer(self._folder / name, self._keep_last)
            if self._asynchronous:
                tensors = _on_host(tensors)
        if self._asynchronous:
            UNDER_WAY.add(Path(writer.path))
            self._writing = self._thread.submit(write_tensors, writer, tensors, self._background.group)
        else:
            write_tensors(writer, tensors, self._ranks.group)

    def check_can_save(self, step: int) -> None:
        """Check the folder at the beginning of a run, rather than after hours.

        Raises:
            ValueError: on every rank, where the folder holds a checkpoint of `step` or later, from which a restart
                would go on, or where another run saves there.
        """
        self.wait()
        with self._ranks.together() as phase:
            phase.own = self._claim(step)
        check_steps(phase.all)

    def wait(self) -> None:
        """Wait until the save in the background is on the disk.

        Raises:
            RuntimeError: on every rank, where it failed.
            ValueError: after `close`, as all methods do.
        """
        if self._is_closed:
            raise ValueError("this Checkpointer is closed: make another one to save or load.")
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, path: str | os.PathLike[str] | None = None, *, may_be_empty: bool = False) -> Loaded | None:
        """Load everything there was when it was saved, into the chunks, optimizer and others as they are.

        To go on training, with an optimizer, the random states are those of then too, by each rank's stage and replica:
        ranks that have both in common, as those of a tensor-parallel group, draw the same. Where stages or replicas
        were more or fewer, the states are seeded from the run's seed, the step and both, and rank 0 says so by a
        warning.

        Where the latest one is damaged, the one before it is loaded, and rank 0 says so by a warning. The next save
        sets the damaged one aside.

        Args:
            path: a run's folder, whose latest checkpoint is taken, or one checkpoint; None for the run's own folder.
            may_be_empty: return None where there is no checkpoint, instead of an error: the first start of a run.

        Returns:
            The step and `data` of the save; None where there was no checkpoint and `may_be_empty` is set.

        Raises:
            ValueError: on every rank, where there is no checkpoint, or one of another model, or where all are damaged
                or would execute code. Nothing has been changed then, nor where the system cannot read, which is no
                damage and raised as it is.
        """
        self.wait()
        rank, found = self._ranks.rank, []
        with self._ranks.together() as phase:
            if rank == 0:
                found = find_checkpoints(self._folder if path is None else path, may_be_empty=may_be_empty)
            phase.own = [str(checkpoint) for checkpoint in found], own_place(rank)
        candidates = [Path(checkpoint) for checkpoint in phase.all[0][0]]
        places = [place for _, place in phase.all]
        for candidate, before in zip(candidates, [*candidates[1:], None]):
            try:
                return self._load(candidate, places)
            except DamagedError as error:
                if before is None:
                    raise
                if rank == 0:
                    warnings.warn(f"{error} {before.name} is loaded in its place.", stacklevel=2)
                if candidate.parent.resolve() == self._folder.resolve():
                    self._damaged.append(candidate)
        return None

    def _load(self, checkpoint: Path, places: Sequence[Place]) -> Loaded:
        with self._ranks.together() as phase:
            reader, state = Reader(checkpoint), self._full_state()
            run = reader.read_value("run")
            if missing := self._others.keys() - run["others"].keys():
                raise ValueError(
                    f"the checkpoint {checkpoint} has no state of {sorted(missing)}, only of {sorted(run['others'])}: "
                    "pass the others under the names they were saved with."
                )
            goes_on = bool(self._optimizers) and self._is_of_run
            whose = find_state(self._ranks.rank, places, run.get("places", [])) if goes_on else None
            states = None if whose is None else reader.read_value(f"rng.{whose}")
            seed = seed_of(self._ranks.rank, places, run["seed"], run["step"])
            load = self._fetch(reader, state, run)
            phase.own = reader.checksum, sorted(state.keys(reader, run["aliases"]))
        with self._ranks.together():
            check_one_checkpoint(checkpoint, [checksum for checksum, _ in phase.all])
            if not self._trained_only:  # then a checkpoint of everything has more
                check_all_used(reader, [keys for _, keys in phase.all])
            load()
            if goes_on:  # to go on training
                seed_random(seed) if states is None else set_random_states(states)
        if goes_on and states is None and self._ranks.rank == 0:
            warnings.warn(
                f"{checkpoint} was saved by {run['world_size']} ranks in another arrangement than these "
                f"{self._ranks.num_ranks}: their random states do not fit and are seeded anew, from the seed "
                f"{run['seed']}, step {run['step']}, and each rank's stage and replica.",
                stacklevel=3,
            )
        return Loaded(run["step"], run["data"])

    def _full_state(self) -> FullState:
        finalize_weights(self._chunks, self._optimizers)
        return FullState(self._chunks, self._optimizers, *self._naming, has_weights=self._is_of_run)

    def _fetch(self, reader: Reader, state: FullState, run: dict[str, Any]) -> Callable[[], None]:
        """Read what this rank needs, and leave everything as it is. What is returned loads it into chunks, optimizers
        and others."""
        load_model = state.fetch_model(reader, run["aliases"])
        load_optimizers = state.fetch_optimizers(reader, run) if self._optimizers else lambda: None

        def load() -> None:
            load_model()
            load_optimizers()
            for name, other in self._others.items():
                if isinstance(other, LRScheduler):
                    load_scheduler(other, run["others"][name])
                else:
                    other.load_state_dict(run["others"][name])

        return load

    def _own(self, step: int, state: FullState, common: dict[str, Any]) -> dict[str, Any]:
        """What other ranks need from this rank to save."""
        rank, is_alone = self._ranks.rank, self._ranks.num_ranks == 1
        uses = [list(use) for use in uses_of(state, rank)]
        packed = serialise(state.settings(), "what the optimizer has in its groups and state").numpy().data
        return {
            "step": self._claim(step),
            "place": own_place(rank),
            "fingerprints": {} if is_alone else fingerprints_of(**common),
            "optimizers": base64.b64encode(packed).decode(),
            "aliases": state.aliases,
            "uses": uses if self._uses[rank : rank + 1] != [uses] else None,  # as before
        }

    def _run_of(self, step: int, data: Any, ranks: list[dict[str, Any]]) -> dict[str, Any]:
        """What a checkpoint holds besides tensors by name. Replicas hand in the same parameter groups."""
        optimizers = [deserialise(base64.b64decode(rank["optimizers"])) for rank in ranks]
        groups = {repr(group): group for one in optimizers for group in one["options"]}
        return {
            "step": step,
            "data": data,
            "options": list(groups.values()),
            "numbers": {name: numbers for one in optimizers for name, numbers in one["numbers"].items()},
            "aliases": {name: first for rank in ranks for name, first in rank["aliases"].items()},
            "world_size": self._ranks.num_ranks,
            "places": [rank["place"] for rank in ranks],
            "seed": torch.initial_seed(),
        }

    def _begin(self, step: int) -> Path:
        """What is written to, on rank 0: a folder in the run's."""
        remove_incomplete(self._folder)
        return begin_checkpoint(self._folder / name_of(step))

    def _claim(self, step: int) -> int:
        """The step, which may be saved: on rank 0, the folder is this run's, and holds no later one."""
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"a step is a whole number from 0 on, got {step!r}.")
        if self._ranks.rank != 0:
            return step
        self._folder.mkdir(parents=True, exist_ok=True)
        lock_folder(self._folder)
        while self._damaged:
            set_aside(self._damaged.pop())
        newest = next(reversed(checkpoints_in(self._folder)), -1)
        if newest >= step:
            raise ValueError(
                f"{self._folder} holds a checkpoint of step {newest}, from which a restart would go on rather than "
                f"from step {step}: load that one, move it away, or save to another folder."
            )
        return step


def _on_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A copy, also of what is there already: training goes on while it is written."""
    return {key: tensor.detach().to("cpu", copy=True) for key, tensor in tensors.items()}
