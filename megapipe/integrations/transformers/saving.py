"""Write weights in transformers' own format: each rank its own, and nobody sends any to another.

What is converted back into the form of files (see `loading`) is one layer at a time.
"""

from __future__ import annotations

import copy
import importlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ... import parallel_state
from .files import Entry, SafetensorsFile, share_out
from .step import tied_names

__all__ = ["save_pretrained"]


def save_pretrained(chunks: Sequence[Any], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9) -> None:
    """Write the model into `folder`, as transformers' `save_pretrained` would write it. Every rank calls it.

    One file where everything fits, written by one rank after the other; otherwise each rank writes files of its own,
    and the first one their index. Nothing is sent to another rank. All ranks need the same folder. Of chunks with
    adapters of `peft` only these are written. Save the tokenizer yourself.

    Args:
        max_file_size: bytes. A larger tensor has a file of its own.
    """
    folder, is_of_adapters = Path(folder), has_adapters(chunks[0])
    group = parallel_state.find_pipeline_group()
    name = "adapter_model" if is_of_adapters else "model"
    files = share_out(_entries_by_stage(chunks, group), math.inf if is_of_adapters else max_file_size, folder / name)
    targets = _gather([_targets(chunk) for chunk in chunks] if is_of_adapters else [], group)
    is_writer = not dist.is_initialized() or parallel_state.get_data_parallel_rank() == 0
    is_first = is_writer and (group is None or group.rank() == 0)
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.create()
    _write(chunks, files, is_writer, group)
    if is_first:
        _finish(folder, name, files)
        if is_of_adapters:
            _save_adapter_config(chunks[0], [one for of_rank in targets for one in of_rank], folder)
        else:
            _save_config(chunks[0], folder)
    if dist.is_initialized():
        dist.barrier()  # replicas too find all there


def _entries_by_stage(chunks: Sequence[Any], group: Any) -> list[list[Entry]]:
    own = [
        [chunk.stage.index, [[name, str(t.dtype), list(t.shape)] for name, t in _to_save(chunk, on_meta=True)]]
        for chunk in chunks
    ]
    by_stage = sorted((one for of_rank in _gather(own, group) for one in of_rank), key=lambda one: one[0])
    return [[Entry.read(*entry) for entry in entries] for _, entries in by_stage]


def _gather(value: Any, group: Any) -> list[Any]:
    """Of all ranks of the pipeline, which wait for each other."""
    return [value] if group is None else parallel_state.all_gather_json(value, group)


def _write(chunks: Sequence[Any], files: Sequence[SafetensorsFile], is_writer: bool, group: Any) -> None:
    """Into a single file one rank after the other, into several all at once, as no two have the same ones."""
    places = {entry.name: file for file in files for entry in file.entries}
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    for turn in range(size if len(files) == 1 else 1):
        _gather(None, group)
        if turn == rank or len(files) > 1:
            for chunk in chunks:
                for name, tensor in _to_save(chunk):
                    if is_writer:
                        places[name].write(name, tensor)
    _gather(None, group)


def _to_save(chunk: Any, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a chunk as they are in files, layer by layer."""
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    state = _adapters_of(chunk) if has_adapters(chunk) else chunk.state_dict()
    by_layer: dict[int | None, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if name not in tied_names(chunk):
            by_layer[chunk.parts.layer_of(name)][name] = tensor
    for tensors in by_layer.values():
        whole = {name: tensor.to("meta") if on_meta else _whole(tensor) for name, tensor in tensors.items()}
        if has_adapters(chunk):
            whole = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
        else:
            whole = revert(chunk, whole)
        yield from whole.items()


def has_adapters(chunk: Any) -> bool:
    """Whether `add_adapter` has been called."""
    return bool(getattr(chunk, "_hf_peft_config_loaded", False))


def _adapters_of(chunk: Any) -> dict[str, Tensor]:
    peft: Any = importlib.import_module("peft")
    name = chunk.active_adapters()[0]
    adapters: dict[str, Tensor] = peft.get_peft_model_state_dict(chunk, adapter_name=name, save_embedding_layers=False)
    return adapters


def _whole(tensor: Tensor) -> Tensor:
    """Of a sharded one, all shards."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _finish(folder: Path, name: str, files: Sequence[SafetensorsFile]) -> None:
    """Give all files their names, remove what an earlier model left, and write the index."""
    for file in files:
        file.finish()
    index = folder / f"{name}.safetensors.index.json"
    for earlier in {index, *folder.glob(f"{name}.safetensors"), *folder.glob(f"{name}-*-of-*.safetensors")}:
        if earlier not in {file.path for file in files}:
            earlier.unlink(missing_ok=True)
    if len(files) > 1:
        where = {entry.name: file.path.name for file in files for entry in file.entries}
        total = sum(entry.num_bytes for file in files for entry in file.entries)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True))


def _adapter_config(chunk: Any) -> Any:
    return chunk.peft_config[chunk.active_adapters()[0]]


def _targets(chunk: Any) -> Any:
    targets = _adapter_config(chunk).target_modules
    return sorted(targets) if isinstance(targets, set) else targets


def _save_adapter_config(chunk: Any, targets: Sequence[Any], folder: Path) -> None:
    """With the modules that have adapters on any stage: peft has found "all-linear" ones on each by themselves."""
    config = copy.deepcopy(_adapter_config(chunk))
    if all(isinstance(one, (set, list)) for one in targets):
        config.target_modules = set().union(*targets)
    config.save_pretrained(folder)


def _save_config(chunk: Any, folder: Path) -> None:
    config = copy.deepcopy(chunk.config.model_config)
    config.architectures, config.dtype = [type(chunk).__name__], chunk.dtype
    config.save_pretrained(folder)
    if chunk.can_generate():
        chunk.generation_config.save_pretrained(folder)
