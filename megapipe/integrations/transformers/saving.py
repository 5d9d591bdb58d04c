"""Write weights in transformers' own format: where they fill several files each rank its own."""

from __future__ import annotations

import copy
import importlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import parallel_state
from ...all_ranks import AllRanks
from ...failures import is_disk_full
from ...safetensors_files import Entry, SafetensorsFile, finish_files, share_out
from ...training import finalize_weights
from ...weights_out import entries_of
from .adapters import has_adapters, save_adapter_config
from .weights import check_floats, named_weights, to_save

OF_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def save_pretrained(chunks: Sequence[Any], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9) -> None:
    """Write the model into `folder`, as transformers' `save_pretrained` would write it. Every rank calls it.

    One file where everything fits, which rank 0 collects and writes; otherwise each rank writes files of its own, and
    rank 0 their index. All ranks need the same folder. Of chunks with adapters of `peft` only these are written, into
    one file. Save the tokenizer yourself.

    Args:
        max_file_size: bytes. A larger tensor has a file of its own. A rank that writes holds one file in host memory.

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
    stages = sorted((number, member, *of) for member in members for number, *of in phase.all[member])
    files: list[SafetensorsFile] = []
    is_first = ranks.rank == 0
    try:
        with ranks.together(), _telling(folder, ranks.rank):
            entries = _entries_by_stage(stages)
            is_of_adapters = has_adapters(chunks[0])
            name = "adapter_model" if is_of_adapters else "model"
            files += share_out([*entries.values()], math.inf if is_of_adapters else max_file_size, folder / name)
            if is_first:
                folder.mkdir(parents=True, exist_ok=True)
        with ranks.together(), _telling(folder, ranks.rank):
            if len(files) == 1:
                _write(named_weights(chunks, to=0), files if is_first else [])
            else:
                is_writer = not dist.is_initialized() or parallel_state.get_data_parallel_rank() == 0
                own = [{entry.name for entry in entries[chunk.stage.index]} for chunk in chunks]
                tensors = (one for chunk, names in zip(chunks, own) for one in to_save(chunk) if one[0] in names)
                _write(tensors, [f for names in own for f in files if f.entries[0].name in names and is_writer])
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
    """Its stage, of how many, the names, dtypes and shapes of the tensors to be saved, and its adapters."""
    adapters = chunk.active_adapters() if has_adapters(chunk) else []
    if not has_adapters(chunk):
        check_floats(chunk)
    entries = [] if len(adapters) > 1 else [[name, str(t.dtype), list(t.shape)] for name, t in to_save(chunk, True)]
    return [chunk.stage.index, chunk.stage.num_stages, entries, adapters]


def _entries_by_stage(stages: Sequence[Any]) -> dict[int, list[Entry]]:
    """The tensors that each stage saves. Raises ValueError where the stages make neither a model nor an adapter."""
    entries: dict[int, list[Entry]] = {number: [] for number, *_ in stages}
    for number, _, entry in entries_of("save_pretrained", [stage[:4] for stage in stages]):
        entries[number].append(entry)
    active = {tuple(adapters) for *_, adapters in stages}
    if len(active) > 1 or len(*active) > 1:
        raise ValueError(
            f"save_pretrained writes one adapter, the same of all stages, and active are {sorted(active)}: call "
            "add_adapter and set_adapter alike for all chunks, and save one adapter after the other."
        )
    return entries


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


def _write(tensors: Iterator[tuple[str, Tensor]], files: Sequence[SafetensorsFile]) -> None:
    """Write the files, whose tensors come one after the other, and then those of files of other ranks."""
    try:
        for file in files:
            held = {}
            for name, tensor in itertools.islice(tensors, len(file.entries)):
                held[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            file.write(held)
    finally:
        for _ in tensors:  # to the end, as all who send tensors, or have shards of them, take part in it
            pass


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
