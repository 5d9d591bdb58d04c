"""A checkpoint's model as safetensors, for tools that know nothing of pipelines: one file, or several with an index."""

from __future__ import annotations

import os
from pathlib import Path

from ..safetensors_files import Entry, finish_files, import_safetensors, share_out
from .files import find_checkpoints
from .reading import Reader


def save_safetensors(
    checkpoint: str | os.PathLike[str], folder: str | os.PathLike[str], max_file_size: int = 5 * 10**9
) -> list[Path]:
    """Write the model of a checkpoint into `folder`, under the whole model's names. One process does it, without other
    ranks.

    Args:
        checkpoint: a run's folder, whose latest checkpoint is taken, or one checkpoint.
        folder: gets model.safetensors, or where that would be larger than `max_file_size` bytes,
            model-00001-of-00003.safetensors and so on, and model.safetensors.index.json, as transformers and others
            read them. What an earlier export left there is removed. One file at a time is in memory.

    Returns:
        The files with tensors. Of a tied parameter there is the first name only.

    Raises:
        ValueError: where there is no checkpoint or no model in it, or no `safetensors` is installed.
    """
    import_safetensors()
    reader = Reader(find_checkpoints(checkpoint)[0])
    entries = [
        Entry(key.removeprefix("model."), what.properties.dtype, tuple(what.size))
        for key, what in reader.contents.items()
        if key.startswith("model.") and not key.endswith("_extra_state")
    ]
    if not entries:
        raise ValueError(f"{reader.path} holds no model: no key in it begins with 'model.'.")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = share_out([entries], max_file_size, folder / "model")
    try:
        for file in files:
            tensors = {entry.name: reader.empty(f"model.{entry.name}") for entry in file.entries}
            reader.read({f"model.{name}": tensor for name, tensor in tensors.items()})
            file.write(tensors)
            del tensors  # before the next file's are made
        finish_files(folder, "model", files)
    except BaseException:
        for file in files:
            file.discard()
        raise
    return [file.path for file in files]
