"""A checkpoint's model as safetensors, for tools that know nothing of pipelines: one file, or several with an index.

The names in the file are those of the whole model. Needs the package `safetensors` (extra "safetensors").
"""

from __future__ import annotations

import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .files import Reader, find_checkpoint

__all__ = ["save_safetensors"]


def save_safetensors(
    checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9
) -> list[Path]:
    """Write the model of a checkpoint into `folder`. One process does it, without other ranks.

    Args:
        checkpoint: a run's folder, whose latest checkpoint is taken, or one checkpoint.
        folder: gets model.safetensors, or where that would be larger than `max_file_size` bytes,
            model-00001-of-00003.safetensors and so on, and model.safetensors.index.json, as transformers and others
            read them. What an earlier export left there is removed. At most one file's tensors are in memory at a time.

    Returns:
        The files with tensors. Of a tied parameter there is the first name only.

    Raises:
        ValueError: where there is no checkpoint or no model in it.
        ImportError: without safetensors.
    """
    save_file = _safetensors().save_file
    reader = Reader(find_checkpoint(checkpoint))
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {
        key: what.size.numel() * what.properties.dtype.itemsize
        for key, what in reader.contents.items()
        if key.startswith("model.") and not key.endswith("_extra_state")
    }
    if not sizes:
        raise ValueError(f"{reader.path} holds no model: no key in it begins with 'model.'.")
    shares = _divide(sizes, max_file_size)
    paths: list[Path] = []
    for number, keys in enumerate(shares, 1):
        name = "model.safetensors" if len(shares) == 1 else f"model-{number:05d}-of-{len(shares):05d}.safetensors"
        tensors = {key: _empty(reader.contents[key]) for key in keys}
        reader.read(tensors)
        paths.append(folder / name)
        named = {key.removeprefix("model."): tensor for key, tensor in tensors.items()}
        save_file(named, paths[-1], metadata={"format": "pt"})
    index_path = folder / "model.safetensors.index.json"
    for earlier in {folder / "model.safetensors", index_path, *folder.glob("model-*-of-*.safetensors")} - {*paths}:
        earlier.unlink(missing_ok=True)
    if len(shares) > 1:
        where = {key.removeprefix("model."): path.name for keys, path in zip(shares, paths) for key in keys}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        index_path.write_text(json.dumps(index, indent=2, sort_keys=True))
    return paths


def _divide(sizes: dict[str, int], max_size: int) -> list[list[str]]:
    """Keys in their order, as many in each file as fit; one that is larger than all has a file of its own."""
    shares: list[list[str]] = [[]]
    filled = 0
    for key, size in sizes.items():
        if shares[-1] and filled + size > max_size:
            shares.append([])
            filled = 0
        shares[-1].append(key)
        filled += size
    return shares


def _empty(what: TensorStorageMetadata) -> torch.Tensor:
    return torch.empty(what.size, dtype=what.properties.dtype)


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ImportError as error:
        raise ImportError(
            f"save_safetensors needs the package safetensors ({error}): pip install safetensors."
        ) from error
