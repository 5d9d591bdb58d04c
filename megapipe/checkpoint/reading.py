"""Checkpoints as they are read: on each rank alone, without executing anything, and only what was written.

The list of contents, a pickle, is read with an allow-list of the classes that torch writes there. Changed bytes are
refused: torch writes checksums with its tensors, but never looks at them.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import struct
import zipfile
import zlib
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .files import checksum_of, find_checkpoints

OF_TORCH = "What torch.distributed.checkpoint saved by itself, its own load reads into the state_dict() of the chunks."


class DamagedError(ValueError):
    """Files of a checkpoint are not those that were written, or are gone."""


class Reader:
    """Reads a checkpoint on this rank alone.

    Raises:
        DamagedError: where its list of contents is not what torch writes for tensors, or asks for anything else, and
            where files are damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.contents: dict[str, TensorStorageMetadata] = {}
        try:
            stream = io.BytesIO(data := (path / ".metadata").read_bytes())
            self._metadata: Metadata = _Unpickler(stream).load()
            end = stream.tell()
            if data[end:] not in (b"", checksum_of(data[:end])):  # it is empty where torch wrote it alone
                raise pickle.UnpicklingError("its checksum is wrong")
            for key, what in self._metadata.state_dict_metadata.items():
                if not isinstance(what, TensorStorageMetadata):
                    raise pickle.UnpicklingError(f"{key} is no tensor")
                self.contents[key] = what
            for stored in self._metadata.storage_data.values():
                if Path(stored.relative_path).name != stored.relative_path:
                    raise pickle.UnpicklingError(f"it points to {stored.relative_path}, outside of the folder")
        except Exception as error:
            raise DamagedError(
                f"{path} is not a checkpoint that megapipe wrote, or it is damaged (.metadata: {error}). Nothing of it "
                f"was used. {OF_TORCH}"
            ) from error

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill the tensors with what the checkpoint holds under their keys. Of DTensors each rank reads its shard."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        items: dict[MetadataIndex, list[ReadItem]] = {}
        try:
            for item in planner.create_local_plan().items:
                items.setdefault(item.storage_index, []).append(item)
            for index, parts in items.items():
                stored = self._stored(self._metadata.storage_data[index])
                for item in parts:
                    part = stored
                    for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                        part = part.narrow(dim, offset, length)
                    target = planner.resolve_tensor(item).detach()
                    if target.shape != part.shape:  # copy_ would expand it
                        raise ValueError(f"{index.fqn} has shape {[*part.shape]} and not {[*target.shape]}")
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        except Exception as error:
            raise DamagedError(
                f"{self.path} cannot be read ({type(error).__name__}: {_first_line(error)}): its files are damaged or "
                "missing. Load another checkpoint."
            ) from error

    def _stored(self, info: _StorageInfo) -> Tensor:
        """A tensor, or a shard of one. Raises BadZipFile, with the file's name, where a bit has changed since."""
        try:
            with open(self.path / info.relative_path, "rb") as file:
                file.seek(info.offset)
                data = file.read(info.length)
            for entry in zipfile.ZipFile(io.BytesIO(data)).infolist():
                name_and_extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
                begin = entry.header_offset + 30 + sum(name_and_extra)
                found = zlib.crc32(memoryview(data)[begin : begin + entry.file_size])
                if entry.CRC not in (found, 0):  # it is 0 where torch was told to compute none
                    raise ValueError(f"checksum {found:08x} of {entry.filename} where it was {entry.CRC:08x}")
            stored: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
            return stored
        except Exception as error:
            raise zipfile.BadZipFile(f"{info.relative_path}: {_first_line(error)}") from error

    def read_value(self, key: str) -> Any:
        """What `serialise` was given."""
        if key not in self.contents:
            raise ValueError(f"{self.path} has no {key}: no Checkpointer of megapipe has saved it. {OF_TORCH}")
        target = self.empty(key)
        self.read({key: target})
        return deserialise(target.numpy().tobytes())

    def empty(self, key: str) -> Tensor:
        """A tensor to read an entry into."""
        what = self.contents[key]
        return torch.empty(what.size, dtype=what.properties.dtype)


class Loaded(NamedTuple):
    """The position in a run.

    Attributes:
        step: the number of steps before the save.
        data: as it was passed to `save`.
    """

    step: int
    data: Any


def read_position(path: str | os.PathLike[str]) -> Loaded:
    """Step and data of a checkpoint, or of the latest in a run's folder. Any process may ask, without other ranks.

    Raises:
        ValueError: where there is none.
    """
    run = Reader(find_checkpoints(path)[0]).read_value("run")
    return Loaded(run["step"], run["data"])


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].partition(". ")[0]


_CLASSES = (
    contents.BytesStorageMetadata,
    contents.ChunkStorageMetadata,
    contents.Metadata,
    contents.MetadataIndex,
    contents.StorageMeta,
    contents.TensorProperties,
    contents.TensorStorageMetadata,
    contents._MEM_FORMAT_ENCODING,
    _StorageInfo,
    torch.Size,
)
_ALLOWED: dict[tuple[str, str], Any] = {(found.__module__, found.__qualname__): found for found in _CLASSES}
_ALLOWED["torch.serialization", "_get_layout"] = torch.serialization._get_layout


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name in ("PosixPath", "WindowsPath"):
            return PurePath  # where it was saved, perhaps on another system
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def serialise(value: Any, what: str) -> Tensor:
    """A value of numbers, strings, lists, dicts and tensors as a tensor of bytes.

    Args:
        what: names the value in the error.

    Raises:
        TypeError: where it could not be read back without executing code.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        deserialise(stream.getvalue())
    except (pickle.PickleError, AttributeError, TypeError) as error:
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        raise TypeError(
            f"{what} cannot be saved so that loading it executes no code: use numbers, strings, lists, dicts and "
            f"tensors, not {unknown[1] if unknown else str(error).splitlines()[0]}."
        ) from error
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)


def deserialise(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)
