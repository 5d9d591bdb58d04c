"""Read weights in transformers' own format: each rank its own, one layer at a time.

Names and shapes in files differ from those in memory for some models (experts, for instance, are stored one by one).
transformers knows how to convert them.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ...all_ranks import AllRanks
from ...training import finalize_weights
from .adapters import has_adapters, load_adapters
from .boundaries import Absent, cut
from .build import default_device, is_meta
from .heads import name_of_head, put_head, whole_of
from .step import tie_weights, tied_names
from .whole_model import allocate, allocate_around, classifier_of, initialise

FILES = ("model.safetensors", "pytorch_model.bin")
"""What weights are in, or in several with an index of this name and `.index.json`. The first that is there is read."""


def load_weights(
    chunks: Sequence[Any],
    path: str | os.PathLike[str],
    *,
    after_layer: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Read the weights of this rank's chunks from a folder of transformers' files: safetensors, or `pytorch_model.bin`.

    Only tensors of this rank are read; dtypes become those of the chunks. Every rank calls it, before `fully_shard`. Of
    chunks with an adapter only that is read, as `save_pretrained` has written it. Otherwise the folder's settings of
    generation, which `save_pretrained` writes again, are read too. A model without a head gets the one that
    `build_chunks` has drawn, and a warning.

    Args:
        after_layer: called with each layer when its weights are there, to quantise it, for example. Of chunks that were
            built with device="meta" no more than one layer is then in memory as it is in the files.
        device: of chunks that were built with device="meta"; None takes the same as `build_chunks`.

    Raises:
        ValueError: on every rank, where something is missing, or of another shape, or a head is not the embedding that
            the config ties it to.
        FileNotFoundError: on every rank, where there are no such files.
    """
    path = Path(path)
    with AllRanks("the loading of a model", dist.group.WORLD).together(), _no_progress_bars():
        finalize_weights(chunks)  # or a step that is taken back would put the old ones back
        if has_adapters(chunks[0]):
            for chunk in chunks:
                load_adapters(chunk, path)
            return
        files = _files_of(path)
        are_empty = is_meta(chunks[0].device)
        for chunk in chunks:
            loaded = _Loaded(chunk, device or default_device() if are_empty else None, after_layer)
            _load_chunk(chunk, loaded, files, path)
            if (path / "generation_config.json").exists() and chunk.can_generate():
                transformers: Any = importlib.import_module("transformers")
                chunk.generation_config = transformers.GenerationConfig.from_pretrained(path)
    if are_empty:
        tie_weights(chunks)


class _Loaded:
    """The tensors of a chunk that are filled from files.

    Args:
        device: where they are made, before they are filled. None where they are there.
    """

    def __init__(self, chunk: Any, device: Any, after_layer: Callable[[Any], Any] | None) -> None:
        self._chunk, self._device, self._after_layer = chunk, device, after_layer
        if device is not None:
            allocate_around(chunk, chunk.parts.layers_of(chunk), device)
            initialise(chunk, None)
            put_head(chunk, device)
        self.targets: dict[str, Any] = chunk.state_dict()

    @contextmanager
    def layer(self, number: int | None) -> Iterator[None]:
        """Around the filling of a layer; None is what lies outside of them."""
        name = f"{self._chunk.parts.layers}.{number}"
        if number is not None and self._device is not None:
            layer = self._chunk.get_submodule(name)
            allocate(layer, self._device)
            initialise(self._chunk, None, name)
            self.targets |= {f"{name}.{own}": tensor for own, tensor in layer.state_dict().items()}
        yield
        if number is not None and self._after_layer is not None:
            for one in [one for one in self.targets if one.startswith(f"{name}.")]:
                del self.targets[one]  # which would be kept in memory
            self._after_layer(self._chunk.get_submodule(name))


def _files_of(path: Path) -> dict[str, str]:
    """Every name in the files, with the file that has it."""
    for single in FILES:
        if (path / single).exists():  # before an index, which an earlier save may have left
            with _opened(path / single) as (names, _):
                return dict.fromkeys(names, single)
        if (index := path / f"{single}.index.json").exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
            return files
    raise FileNotFoundError(f"{path} has no {' or '.join(FILES)}, nor an index of them: give a folder with one.")


@contextmanager
def _opened(file: Path) -> Iterator[tuple[list[str], Callable[[str], Any]]]:
    """The names in a file, and what returns the tensor of a name: read when it is asked for, but for the oldest .bin
    files."""
    if file.suffix == ".bin":
        state = torch.load(file, "cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
        yield list(state), state.__getitem__
        return
    with importlib.import_module("safetensors").safe_open(file, framework="pt") as tensors:
        yield list(tensors.keys()), tensors.get_slice


@contextmanager
def _slices(keys: Sequence[str], files: dict[str, str], path: Path) -> Iterator[dict[str, Any]]:
    """What is read only when it is asked for. Files are mapped into memory for as long."""
    with ExitStack() as stack:
        names = sorted({files[key] for key in keys})
        read = {name: stack.enter_context(_opened(path / name))[1] for name in names}
        yield {key: read[files[key]](key) for key in keys}


def _load_chunk(chunk: Any, own: _Loaded, files: dict[str, str], path: Path) -> None:
    loading: Any = importlib.import_module("transformers.core_model_loading")
    model = whole_of(chunk, chunk.dtype)
    names_of = _names_in_model(model, chunk, files)
    _check_heads(chunk, model, names_of.values(), path)
    keys = {
        layer: [k for k, name in names_of.items() if chunk.parts.layer_of(name) == layer]
        for layer in (None, *chunk.layers)
    }
    missing = set(own.targets)
    ties = {name: source for name, source in tied_names(chunk).items() if name in missing and source not in missing}
    wanted = {*missing, *ties.values()}
    cut(model, chunk.parts, wanted.__contains__)
    layers = chunk.parts.layers_of(model)
    for number in set(range(len(layers))).difference(chunk.layers):
        layers[number] = Absent()
    config = _load_config(model, chunk.dtype)
    for layer in (None, *chunk.layers):
        with own.layer(layer), _slices(keys[layer], files, path) as slices:
            info, _ = loading.convert_and_load_state_dict_in_model(model, slices, config)
            if info.mismatched_keys:
                name, got, expected = next(iter(info.mismatched_keys))
                raise ValueError(f"{name} in {path} has the shape {list(got)}, but the model {list(expected)}.")
            loaded = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
            for name, source in tied_names(chunk).items():
                if name in loaded and source in loaded and not torch.equal(loaded[name], loaded[source]):
                    raise ValueError(
                        f"{path} has other values for {name} than for {source}, which its config ties: set "
                        "tie_word_embeddings to false in its config.json."
                    )
            for name, source in [*((name, name) for name in loaded), *ties.items()]:
                if source in loaded and name in own.targets:
                    own.targets[name].copy_(loaded[source])
                    missing.discard(name)
            del loaded
            model.to("meta")
    parameters = dict(chunk.named_parameters(remove_duplicate=False))
    filled = {parameters.get(name) for name in own.targets.keys() - missing}
    if missing := {name for name in missing if name not in parameters or parameters[name] not in filled}:
        _check_missing(chunk, missing, path)


def _check_missing(chunk: Any, missing: set[str], path: Path) -> None:
    """Only the head may be missing, where new weights have been drawn: the files are of a model without one."""
    names = ", ".join(sorted(missing))
    head = chunk.get_output_embeddings()
    is_head = {id(parameter) for parameter in (() if head is None else head.parameters())}
    if classifier_of(chunk.config.model_config) is not None:
        within = f"{chunk.parts.decoder}."
        is_head |= {id(parameter) for name, parameter in chunk.named_parameters() if not name.startswith(within)}
    if any(id(parameter) not in is_head for name, parameter in chunk.named_parameters() if name in missing):
        raise ValueError(f"{path} has no weights for {names}.")
    if not chunk.is_drawn and chunk.config.head is None:
        raise ValueError(
            f"{path} has no weights for {names}: call build_chunks with a seed, from which they are drawn."
        )
    came = "drawn" if chunk.config.head is None else "given"
    warnings.warn(f"{path} has no weights for {names}: they stay as they were {came}.", stacklevel=4)


def _check_heads(chunk: Any, model: Any, names: Iterable[str], path: Path) -> None:
    """Weights of another head than the model's tell that the files are of another model. A model of language may become
    one with scores, but not the other way round, unless its config says so."""
    own, config = set(model.state_dict()), chunk.config.model_config
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    others = [name for name in names if name not in own and not name.startswith(f"{chunk.parts.decoder}.")]
    others = [name for name in others if not any(re.search(one, name) for one in ignored)]
    if others and not config.architectures:
        raise ValueError(
            f"{path} has weights for {others[0]}, and a {type(model).__name__}, which is built as the config has no "
            "architectures, has none of this name: set architectures in the config to the class that the weights are "
            f"of, or to [{type(model).__name__!r}] to leave them out."
        )
    if classifier_of(config) is not None:
        head = name_of_head(model, chunk.parts.decoder)
        if within := [name for name in others if name.startswith(f"{head}.")]:
            raise ValueError(
                f"{path} has weights for {within[0]}, and the model's {head} has none of this name: pass build_chunks "
                "the module that was saved, as head."
            )


def _load_config(model: Any, dtype: torch.dtype) -> Any:
    conversions = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return importlib.import_module("transformers.modeling_utils").LoadStateDictConfig(
        dtype=dtype, dtype_plan=model._get_dtype_plan(dtype), weight_mapping=conversions
    )


def _names_in_model(model: Any, chunk: Any, keys: Iterable[str]) -> dict[str, str]:
    """The names that the model has for those in files, by these."""
    loading: Any = importlib.import_module("transformers.core_model_loading")
    conversions = _load_config(model, chunk.dtype).weight_mapping
    renamings = [one for one in conversions if isinstance(one, loading.WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, loading.WeightConverter)]
    names = model.state_dict()
    prefix = model.base_model_prefix
    return {key: loading.rename_source_key(key, renamings, converters, prefix, names)[0] for key in keys}


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
