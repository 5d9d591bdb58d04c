"""Files of safetensors, which the library `safetensors` writes: which tensors go into which, and their index."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Entry(NamedTuple):
    """A tensor in a file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def read(cls, name: str, dtype: str, shape: Sequence[int]) -> Entry:
        """The entry that another rank has described by texts and numbers."""
        return cls(name, getattr(torch, dtype.removeprefix("torch.")), tuple(shape))

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()


def import_safetensors() -> Any:
    """The library. Raises ValueError where it is not installed."""
    try:
        return importlib.import_module("safetensors.torch") and importlib.import_module("safetensors")
    except ImportError:
        raise ValueError("files of safetensors need safetensors: pip install 'megapipe[safetensors]'.") from None


class SafetensorsFile(NamedTuple):
    """One file. Until `finish` it has another name."""

    path: Path
    entries: list[Entry]

    @property
    def _unfinished(self) -> Path:
        return self.path.with_suffix(".incomplete")

    def write(self, tensors: Mapping[str, Tensor]) -> None:
        """Write all tensors of the file, which are in host memory, contiguous, and have memory of their own.

        Raises:
            OSError: where the system cannot write.
            ValueError: where there is no `safetensors`, or a tensor is of a dtype that files cannot hold.
        """
        safetensors = import_safetensors()
        self._unfinished.touch()
        mode = self._unfinished.stat().st_mode
        try:
            safetensors.torch.save_file(dict(tensors), self._unfinished, metadata={"format": "pt"})
        except KeyError as error:  # from the library's table of dtypes
            name = next((name for name, tensor in tensors.items() if tensor.dtype in error.args), "a tensor")
            raise ValueError(f"{name} is of {error}, which files of safetensors cannot hold.") from error
        except safetensors.SafetensorError as error:
            if number := re.search(r"(?:os error|code:) (\d+)", str(error)):
                raise OSError(int(number[1]), str(error)) from error
            raise
        self._unfinished.chmod(mode)  # 0.8 lets nobody else read it (huggingface/safetensors#782)

    def finish(self) -> None:
        self._unfinished.replace(self.path)

    def discard(self) -> None:
        """One rank does so, where writing failed."""
        self._unfinished.unlink(missing_ok=True)


def share_out(stages: Sequence[Sequence[Entry]], max_size: float, path: Path) -> list[SafetensorsFile]:
    """One file for all, or where that is larger than `max_size` bytes, files of one stage each."""
    everything = [entry for entries in stages for entry in entries]
    if sum(entry.num_bytes for entry in everything) <= max_size:
        return [SafetensorsFile(path.with_name(f"{path.name}.safetensors"), everything)]
    shares: list[list[Entry]] = []
    for entries in stages:
        filled = max_size
        for entry in entries:
            if filled + entry.num_bytes > max_size:
                shares.append([])
                filled = 0
            shares[-1].append(entry)
            filled += entry.num_bytes
    return [
        SafetensorsFile(path.with_name(f"{path.name}-{number:05d}-of-{len(shares):05d}.safetensors"), entries)
        for number, entries in enumerate(shares, 1)
    ]


def finish_files(folder: Path, name: str, files: Sequence[SafetensorsFile]) -> None:
    """One rank does so, when all have written: give all files their names, remove what an earlier model or a killed
    process left, and write the index where there are several."""
    for file in files:
        file.finish()
    index = folder / f"{name}.safetensors.index.json"
    patterns = [f"{name}{part}.{ending}" for part in ("", "-*-of-*") for ending in ("safetensors", "incomplete")]
    earlier = {index, *(path for pattern in patterns for path in folder.glob(pattern))}
    for path in earlier - {file.path for file in files}:
        path.unlink(missing_ok=True)
    if len(files) > 1:
        where = {entry.name: file.path.name for file in files for entry in file.entries}
        total = sum(entry.num_bytes for file in files for entry in file.entries)
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2, sort_keys=True))
