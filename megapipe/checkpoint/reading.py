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
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from .files import OF_MEGAPIPE, checksum_of, find_checkpoints, mark_of

OF_TORCH = "What torch.distributed.checkpoint saved by itself, its own load reads into the state_dict() of the chunks."


class DamagedError(ValueError):
    """Files of a checkpoint are not those that were written, or are gone. What else goes wrong while they are read, as
    where a disk does not answer, says nothing of them."""


class Reader:
    """Reads a checkpoint on this rank alone.

    Attributes:
        contents: what is in it, by key.
        checksum: of its list of contents.

    Raises:
        DamagedError: where its files are damaged or missing. Errors of the system are raised as they are.
        ValueError: where its list of contents asks for more than torch writes for tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            data = (path / ".metadata").read_bytes()
        except FileNotFoundError as error:
            raise DamagedError(self._no_checkpoint(error)) from error
        self.checksum = zlib.crc32(data)
        end = len(data) - len(checksum_of(b""))
        is_whole = data[end:] == checksum_of(data[:end])
        try:
            self._metadata = _metadata_in(data)
        except Exception as error:
            if is_whole and not isinstance(error, pickle.UnpicklingError):
                raise
            raise (ValueError if is_whole else DamagedError)(self._no_checkpoint(error)) from error
        self.contents: dict[str, TensorStorageMetadata] = self._metadata.state_dict_metadata  # type: ignore[assignment]
        self._save_id = str(getattr(self._metadata.storage_meta, "save_id", None))

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill the tensors with what the checkpoint holds under their keys. Of DTensors each rank reads its shard."""
        fill(self._parts(targets))

    def fetch(self, targets: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
        """What `fill` writes into the tensors, in the host's memory. They are left as they are."""
        return [
            (target, part if part.nbytes == part.untyped_storage().nbytes() else part.clone())
            for target, part in self._parts(targets)
        ]

    def _parts(self, targets: dict[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Parts of the tensors, and what belongs there. Each stored tensor is read once."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in planner.create_local_plan().items:
            items.setdefault(item.storage_index, []).append(item)
        for index, parts in items.items():
            info = self._metadata.storage_data[index]
            stored = self._stored(info)
            for item in parts:
                ends = [offset + length for offset, length in zip(item.storage_offsets, item.lengths)]
                if len(ends) != stored.dim() or any(end > size for end, size in zip(ends, stored.shape)):
                    raise self._damaged(info, f"{index.fqn} has shape {[*stored.shape]}, of which {ends} is to be read")
                part = stored
                for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths)):
                    part = part.narrow(dim, offset, length)
                target = planner.resolve_tensor(item).detach()
                once = _once(target)
                if 0 in target.stride() and not _same_bits(part[once].expand_as(part), part):
                    raise ValueError(
                        f"{index.fqn} is expanded here: it shows the same numbers several times, and the checkpoint "
                        f"{self.path} has different ones. Make it a tensor of its own, by contiguous()."
                    )
                yield target[once], part[once]

    def _stored(self, info: _StorageInfo) -> Tensor:
        """A tensor, or a shard of one."""
        data = self._bytes_of(info)
        try:
            _check_archive(data)
        except MemoryError:
            raise
        except Exception as error:  # of bytes that are here
            raise self._damaged(info, error) from error
        try:
            stored = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except (pickle.UnpicklingError, RuntimeError) as error:
            is_of_archive = "inline_container" in str(error) or "PytorchStreamReader" in str(error)
            if isinstance(error, RuntimeError) and not is_of_archive:
                raise
            raise self._damaged(info, error) from error
        if not isinstance(stored, Tensor):
            raise self._damaged(info, f"a {type(stored).__name__} where a tensor was")
        return stored

    def _bytes_of(self, info: _StorageInfo) -> bytes:
        try:
            with open(self.path / info.relative_path, "rb") as file:
                if self._save_id.startswith(OF_MEGAPIPE):  # what torch alone wrote has no marks
                    mark = mark_of(self._save_id, info.relative_path)
                    if (begin := file.read(len(mark))) != mark:
                        found = begin.partition(b"\n")[0][:60].decode(errors="replace")
                        raise self._damaged(info, f"it begins with {found!r} and not with {mark.decode().strip()!r}")
                file.seek(info.offset)
                data = file.read(info.length)
        except FileNotFoundError as error:
            raise self._damaged(info, error) from error
        if len(data) != info.length:
            raise self._damaged(info, f"it ends {info.length - len(data)} bytes too early")
        return data

    def _no_checkpoint(self, error: Exception) -> str:
        return (
            f"{self.path} is not a checkpoint that megapipe wrote, or it is damaged (.metadata: {error}). Nothing of "
            f"it was used. {OF_TORCH}"
        )

    def _damaged(self, info: _StorageInfo, what: Any) -> DamagedError:
        return DamagedError(
            f"{self.path} cannot be read ({info.relative_path}: {_first_line(what)}): its files are damaged, missing "
            "or of another checkpoint. Load another one."
        )

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


def _first_line(error: Any) -> str:
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


def _metadata_in(data: bytes) -> Metadata:
    """A list of contents. What is wrong with it raises an UnpicklingError; damaged bytes raise any error."""
    stream = io.BytesIO(data)
    metadata: Metadata = _Unpickler(stream).load()
    end = stream.tell()
    if data[end:] not in (b"", checksum_of(data[:end])):  # it is empty where torch wrote it alone
        raise pickle.UnpicklingError("its checksum is wrong")
    for key, what in metadata.state_dict_metadata.items():
        if not isinstance(what, TensorStorageMetadata):
            raise pickle.UnpicklingError(f"{key} is no tensor")
    for stored in metadata.storage_data.values():
        if Path(stored.relative_path).name != stored.relative_path:
            raise pickle.UnpicklingError(f"it points to {stored.relative_path}, outside of the folder")
    return metadata


def _check_archive(data: bytes) -> None:
    """Raises BadZipFile, or whatever broken directories lead to, where a bit has changed since torch.save."""
    for entry in zipfile.ZipFile(io.BytesIO(data)).infolist():
        name, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
        begin = entry.header_offset + 30 + name + extra
        if data[entry.header_offset + 30 : begin - extra] != entry.orig_filename.encode():
            raise zipfile.BadZipFile(f"{entry.orig_filename} has another name in its directory")
        found = zlib.crc32(memoryview(data)[begin : begin + entry.file_size])
        if entry.CRC not in (found, 0):  # it is 0 where torch was told to compute none
            raise zipfile.BadZipFile(f"checksum {found:08x} of {entry.filename} where it was {entry.CRC:08x}")


def _once(tensor: Tensor) -> tuple[slice, ...]:
    """Each number of a tensor once: an expanded one shows some several times."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


def fill(parts: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Write what `Reader.fetch` has found."""
    for target, part in parts:
        target.copy_(part)


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
