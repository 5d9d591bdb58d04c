"""Write weights in transformers' own format: each rank its own, and none is sent to another."""

from __future__ import annotations

import copy
import importlib
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ... import parallel_state
from ...all_ranks import AllRanks
from ...failures import is_disk_full
from ...safetensors_files import Entry, SafetensorsFile, finish_files, share_out
from ...training import finalize_weights
from .adapters import has_adapters, save_adapter_config
from .weights import check_floats, to_save

OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def save_pretrained(chunks: Sequence[Any], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9) -> None:
    """Write the model into `folder`, as transformers' `save_pretrained` would write it. Every rank calls it.

    One file where everything fits, written by one rank after the other; otherwise each rank writes files of its own,
    and the first one their index. Nothing is sent to another rank. All ranks need the same folder. Of chunks with
    adapters of `peft` only these are written. Save the tokenizer yourself.

    Args:
        max_file_size: bytes. A larger tensor has a file of its own.

    Raises:
        ValueError: on every rank, where chunks are missing, are quantised, or have not the same single adapter.
        RuntimeError: on every rank, where one cannot write.
    """
    folder, group = Path(folder), parallel_state.find_pipeline_group()
    ranks = AllRanks("the saving of a model", dist.group.WORLD)
    with ranks.together() as phase:
        finalize_weights(chunks)
        phase.own = [_described(chunk) for chunk in chunks]
    members = [0] if group is None else dist.get_process_group_ranks(group)
    stages = sorted(one for member in members for one in phase.all[member])
    files: list[SafetensorsFile] = []
    is_writer = not dist.is_initialized() or parallel_state.get_data_parallel_rank() == 0
    is_first = is_writer and (group is None or group.rank() == 0)
    try:
        with ranks.together(), _telling(folder, ranks.rank):
            _check(stages)
            is_of_adapters = has_adapters(chunks[0])
            name = "adapter_model" if is_of_adapters else "model"
            entries = [[Entry.read(*entry) for entry in stage[-1]] for stage in stages]
            files += share_out(entries, math.inf if is_of_adapters else max_file_size, folder / name)
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
                for file in files:
                    file.create()
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        for turn in range(size if len(files) == 1 else 1):  # several are written all at once, each by one rank
            with ranks.together(), _telling(folder, ranks.rank):
                if turn == rank or len(files) > 1:
                    _write(chunks, files, is_writer)
        with ranks.together(), _telling(folder, ranks.rank):
            if is_first:
                finish_files(folder, name, files)
                if is_of_adapters:
                    save_adapter_config(chunks[0], folder)
                else:
                    for earlier in OF_ADAPTERS:  # which from_pretrained would put on the model
                        (folder / earlier).unlink(missing_ok=True)
                    _save_config(chunks[0], folder)
    except BaseException:
        if is_first:
            for file in files:
                file.discard()
        raise


def _described(chunk: Any) -> list[Any]:
    """Its stage, of how many, its adapters, and the names, dtypes and shapes of the tensors to be saved."""
    adapters = chunk.active_adapters() if has_adapters(chunk) else []
    if not has_adapters(chunk):
        check_floats(chunk)
    entries = [] if len(adapters) > 1 else [[name, str(t.dtype), list(t.shape)] for name, t in to_save(chunk, True)]
    return [chunk.stage.index, chunk.stage.num_stages, adapters, entries]


def _check(stages: Sequence[Any]) -> None:
    """Whether they make a model, or an adapter."""
    numbers = [number for number, *_ in stages]
    num_stages = stages[0][1] if stages else 1
    if numbers != list(range(num_stages)):
        raise ValueError(
            f"save_pretrained needs each of {num_stages} stages once, and was given {numbers}: pass all chunks of each "
            "rank."
        )
    active = {tuple(adapters) for _, _, adapters, _ in stages}
    if len(active) > 1 or len(*active) > 1:
        raise ValueError(
            f"save_pretrained writes one adapter, the same of all stages, and active are {sorted(active)}: call "
            "add_adapter and set_adapter alike for all chunks, and save one adapter after the other."
        )


@contextmanager
def _telling(folder: Path, rank: int) -> Iterator[None]:
    """Tell the user what the system says."""
    try:
        yield
    except OSError as error:
        remedy = ""
        if is_disk_full(error):
            remedy = " The disk, or what you may use of it, is full: make room."
        elif isinstance(error, FileNotFoundError):
            remedy = " All ranks need the same folder."
        raise RuntimeError(f"saving to {folder} failed on rank {rank} ({error}).{remedy}") from error


def _write(chunks: Sequence[Any], files: Sequence[SafetensorsFile], is_writer: bool) -> None:
    """Shards are gathered to the end, where they are, as all who have them take part in it."""
    places = {entry.name: file for file in files for entry in file.entries}
    failure: OSError | None = None
    for chunk in chunks:
        for name, tensor in to_save(chunk):
            if is_writer and failure is None:
                try:
                    places[name].write(name, tensor)
                except OSError as error:
                    failure = error
    if failure is not None:
        raise failure


def _save_config(chunk: Any, folder: Path) -> None:
    config = copy.deepcopy(chunk.config.model_config)
    config.architectures, config.dtype = [_architecture(chunk)], chunk.dtype
    if chunk._auto_class is not None:  # its code is in a folder
        importlib.import_module("transformers.dynamic_module_utils").custom_object_save(chunk, folder, config=config)
    config.save_pretrained(folder)
    if chunk.can_generate():
        chunk.generation_config.save_pretrained(folder)


def _architecture(chunk: Any) -> str:
    """The class of the model, without what has derived others from it."""
    made = ("Captured", "FSDP")
    return next(kind.__name__ for kind in type(chunk).__mro__ if not kind.__name__.startswith(made))
