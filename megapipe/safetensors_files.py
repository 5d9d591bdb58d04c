"""safetensors files that one process writes, or several ranks, each its own tensors in their places.

A file is the length of its header in 8 bytes, the header (JSON: the dtype, shape and place of each tensor), and the
tensors one after the other. https://github.com/huggingface/safetensors
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}


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


class SafetensorsFile:
    """One file. Until `finish` it has another name.

    Args:
        entries: of all ranks, on all ranks.
    """

    def __init__(self, path: Path, entries: Sequence[Entry]) -> None:
        self.path = path
        self.entries = sorted(entries, key=lambda entry: -entry.dtype.itemsize)  # so that all are aligned
        self._unfinished = path.with_suffix(".incomplete")
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._places: dict[str, int] = {}
        end = 0
        for entry in self.entries:
            if entry.dtype not in NAMES:
                raise ValueError(f"{entry.name} is of {entry.dtype}, which files of safetensors cannot hold.")
            begin, end = end, end + entry.num_bytes
            self._places[entry.name] = begin
            header[entry.name] = {"dtype": NAMES[entry.dtype], "shape": list(entry.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = len(text).to_bytes(8, "little") + text
        self._size = len(self._start) + end

    def create(self) -> None:
        """One rank does so, before the others write."""
        with open(self._unfinished, "wb") as file:
            file.write(self._start)
            file.truncate(self._size)

    def write(self, name: str, tensor: Tensor) -> None:
        values = tensor.cpu().contiguous().flatten().view(torch.uint8)
        with open(self._unfinished, "r+b") as file:
            file.seek(len(self._start) + self._places[name])
            file.write(values.numpy().data)  # NumPy's own writing does not say that the disk is full

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
