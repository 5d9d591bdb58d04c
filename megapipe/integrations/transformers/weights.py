"""Weights in and out, in transformers' own format: each rank reads and writes its own, and holds one more layer.

Names and shapes in files differ from those in memory for some models (experts, for instance, are stored one by one).
transformers knows how to convert them, and does it here for one layer at a time.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import parallel_state
from .build import make_meta_model
from .cut import cut
from .files import Entry, SafetensorsFile, share_out
from .step import tied_names

__all__ = ["load_weights", "save_pretrained"]

INDEX = "model.safetensors.index.json"


def load_weights(chunks: Sequence[Any], path: str | os.PathLike[str]) -> None:
    """Read the weights of this rank's chunks from a folder of transformers' safetensors files.

    Only tensors of this rank are read; dtypes become those of the chunks. Each rank calls it by itself, before adapters
    are added and before `fully_shard`.

    Raises ValueError where something is missing, or of another shape; FileNotFoundError where there are no such files.
    """
    path = Path(path)
    files = _files_of(path)
    with _no_progress_bars():
        for chunk in chunks:
            _load_chunk(chunk, files, path)


def _files_of(path: Path) -> dict[str, str]:
    """Every name in the files, with the file that has it."""
    index, single = path / INDEX, path / "model.safetensors"
    if index.exists():
        files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return files
    if not single.exists():
        raise FileNotFoundError(f"{path} has no {single.name}, nor an index: give a folder with safetensors.")
    with importlib.import_module("safetensors").safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single.name)


@contextmanager
def _slices(keys: Sequence[str], files: dict[str, str], path: Path) -> Iterator[dict[str, Any]]:
    """What is read only when it is asked for. Files are mapped into memory for as long."""
    safe_open = importlib.import_module("safetensors").safe_open
    with ExitStack() as stack:
        names = sorted({files[key] for key in keys})
        opened = {name: stack.enter_context(safe_open(path / name, framework="pt")) for name in names}
        yield {key: opened[files[key]].get_slice(key) for key in keys}


def _load_chunk(chunk: Any, files: dict[str, str], path: Path) -> None:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    model = make_meta_model(chunk.config.model_config, chunk.dtype)
    keys = _keys_by_layer(model, chunk, files)
    ties = {} if chunk.stage.is_first else tied_names(chunk)
    cut(model, chunk.parts, chunk.stage, chunk.layers, keep_embedding=chunk.stage.is_last and bool(ties))
    config = _load_config(model, chunk.dtype)
    targets = chunk.state_dict()
    missing = set(targets)
    for layer in (None, *chunk.layers):
        with _slices(keys[layer], files, path) as slices:
            info, _ = loading.convert_and_load_state_dict_in_model(model, slices, config)
            if info.mismatched_keys:
                name, got, expected = next(iter(info.mismatched_keys))
                raise ValueError(f"{name} in {path} has the shape {list(got)}, but the model {list(expected)}.")
            loaded = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
            for name, source in [*((name, name) for name in loaded), *ties.items()]:
                if source in loaded and name in targets:
                    targets[name].copy_(loaded[source])
                    missing.discard(name)
            del loaded
            model.to("meta")
    if chunk.stage.is_first and chunk.stage.is_last:
        missing -= tied_names(chunk).keys()
    if missing:
        raise ValueError(f"{path} has no weights for {', '.join(sorted(missing))}.")


def _load_config(model: Any, dtype: torch.dtype) -> Any:
    conversions = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return importlib.import_module("transformers.modeling_utils").LoadStateDictConfig(
        dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=conversions
    )


def _keys_by_layer(model: Any, chunk: Any, keys: Any) -> dict[int | None, list[str]]:
    """Names in files, by the layer they are for; None for all outside layers."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions = _load_config(model, chunk.dtype).weight_mapping
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    names = model.state_dict()
    found: dict[int | None, list[str]] = defaultdict(list)
    for key in keys:
        name, _ = loading.rename_source_key(key, renamings, converters, model.base_model_prefix, names)
        found[_layer_of(name, chunk)].append(key)
    return found


def _layer_of(name: str, chunk: Any) -> int | None:
    prefix = f"{chunk.parts.decoder}.{chunk.parts.layers}."
    return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """One for each layer would be too many."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    were_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_enabled:
            logging.enable_progress_bar()


def save_pretrained(chunks: Sequence[Any], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9) -> None:
    """Write the model into `folder`, as transformers' `save_pretrained` would write it. Every rank calls it.

    One file where everything fits, written by one rank after the other; otherwise each rank writes files of its own,
    and the first one their index. Nothing is sent to another rank. All ranks need the same folder. Of chunks with
    adapters of `peft` only these are written. Save the tokenizer yourself.

    Args:
        max_file_size: bytes. A larger tensor has a file of its own.
    """
    folder = Path(folder)
    has_adapters = getattr(chunks[0], "_hf_peft_config_loaded", False)
    group = parallel_state.find_pipeline_group()
    is_writer = not dist.is_initialized() or parallel_state.get_data_parallel_rank() == 0
    own = [
        (chunk.stage.index, [Entry.of(name, tensor) for name, tensor in _to_save(chunk, on_meta=True)])
        for chunk in chunks
    ]
    stages = [entries for _, entries in sorted(one for of_rank in _gather(own, group) for one in of_rank)]
    name = "adapter_model" if has_adapters else "model"
    files = share_out(stages, float("inf") if has_adapters else max_file_size, folder / name)
    is_first = is_writer and (group is None or group.rank() == 0)
    if is_first:
        folder.mkdir(parents=True, exist_ok=True)
        for file in files:
            file.create()
    _gather(None, group)
    for rank in range(1 if group is None else group.size()):
        if len(files) > 1 or group is None or rank == group.rank():
            _write(chunks, files, is_writer)
        if len(files) > 1:
            break
        _gather(None, group)
    targets = _gather([_adapter_config(chunk).target_modules for chunk in chunks] if has_adapters else [], group)
    if is_first:
        _finish(folder, name, files)
        if has_adapters:
            _save_adapter_config(chunks[0], [one for of_rank in targets for one in of_rank], folder)
        else:
            _save_config(chunks[0], folder)
    _gather(None, group)


def _gather(value: Any, group: Any) -> list[Any]:
    """Of all ranks of the pipeline, which wait for each other."""
    values = [value]
    if group is not None:
        values = [None] * group.size()
        dist.all_gather_object(values, value, group)
    return values


def _write(chunks: Sequence[Any], files: Sequence[SafetensorsFile], is_writer: bool) -> None:
    places = {entry.name: file for file in files for entry in file.entries}
    for chunk in chunks:
        for name, tensor in _to_save(chunk):
            if is_writer:
                places[name].write(name, tensor)


def _to_save(chunk: Any, on_meta: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a chunk as they are in files, layer by layer."""
    revert = importlib.import_module("transformers.core_model_loading").revert_weight_conversion
    has_adapters = getattr(chunk, "_hf_peft_config_loaded", False)
    state = _adapters_of(chunk) if has_adapters else chunk.state_dict()
    by_layer: dict[int | None, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        if name not in tied_names(chunk):
            by_layer[_layer_of(name, chunk)][name] = tensor
    for tensors in by_layer.values():
        whole = {name: tensor.to("meta") if on_meta else _whole(tensor) for name, tensor in tensors.items()}
        if has_adapters:
            whole = {f"base_model.model.{name}": tensor for name, tensor in whole.items()}
        else:
            whole = revert(chunk, whole)
        yield from whole.items()


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
