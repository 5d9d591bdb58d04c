"""The files of checkpoints: each complete or not there, and read without executing anything.

A checkpoint is a folder of torch.distributed.checkpoint in a run's folder. It is written under another name and renamed
when everything is on the disk: whenever a run dies, a folder with a checkpoint's name is complete. It holds tensors
only; its list of contents, a pickle, is read with an allow-list of the classes that torch writes there. Changed bytes
are refused: torch writes checksums with its tensors but never looks at them, and the list of contents gets one at its
end, where torch does not read.
"""

from __future__ import annotations

import io
import os
import pickle
import platform
import re
import secrets
import shutil
import struct
import warnings
import zipfile
import zlib
from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..failures import collective, is_disk_full

EXCHANGE = "the saving or loading of a checkpoint"
INCOMPLETE = ".incomplete"
DAMAGED = ".damaged"
OF_TORCH = "What torch.distributed.checkpoint saved by itself, its own load reads into the state_dict() of the chunks."


class DamagedError(ValueError):
    """Files of a checkpoint are not those that were written, or are gone."""


def checkpoints_in(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """The complete checkpoints of a run's folder by step, in the order of the steps."""
    if not Path(folder).is_dir():
        return {}
    matches = ((re.fullmatch(r"step_(\d{8,})", path.name), path) for path in Path(folder).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match and path.is_dir()))


def find_checkpoints(path: str | os.PathLike[str], *, may_be_empty: bool = False) -> list[Path]:
    """`path` itself where it is a checkpoint, else all in it, the latest first.

    Raises:
        ValueError: where there is none, unless there may be none.
    """
    if (Path(path) / ".metadata").is_file():
        return [Path(path)]
    if (found := list(checkpoints_in(path).values())) or may_be_empty:
        return found[::-1]
    what = "holds no complete checkpoint" if Path(path).is_dir() else "is no folder"
    raise ValueError(
        f"{path} {what}: give a folder that was saved to, with a folder such as step_00000100 in it, or that one."
    )


def begin_checkpoint(folder: Path, step: int) -> Path:
    """An empty folder to write a checkpoint into, under a name that no other run has. `Writer` makes it appear."""
    path = _incomplete(folder / f"step_{step:08d}")
    path.mkdir()
    return path


def _incomplete(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(4)}{INCOMPLETE}")


def remove_incomplete(folder: str | os.PathLike[str]) -> None:
    """What saves that were interrupted left behind. No save may be under way there."""
    for path in Path(folder).glob(f"step_*{INCOMPLETE}"):
        if re.fullmatch(rf"step_\d{{8,}}(\.[0-9a-f]{{8}})?{INCOMPLETE}", path.name) and path.is_dir():
            _remove(path)


def _remove(path: Path) -> None:
    """A folder, or what is only a link to one. Where that cannot be, the checkpoints are none the worse."""
    try:
        if path.is_symlink():
            path.unlink()
            return
        if not path.name.endswith(INCOMPLETE):
            path = path.rename(_incomplete(path))  # half of a checkpoint must not bear the name of a whole one
        shutil.rmtree(path)
    except OSError as error:
        warnings.warn(f"{path} is no longer needed, but cannot be removed ({error}): remove it by hand.", stacklevel=2)


def set_aside(path: Path) -> None:
    """A damaged checkpoint makes room for one of its step, and is kept to be looked into."""
    target = path.with_name(f"{path.name}.{secrets.token_hex(4)}{DAMAGED}")
    path.rename(target)
    warnings.warn(f"{path} is damaged and now called {target.name}: remove it by hand.", stacklevel=2)


class Writer(FileSystemWriter):
    """Writes this rank's part of one checkpoint of a run's folder. Rank 0 writes the list of contents too, with its
    checksum, makes the checkpoint appear, and removes all but the last `keep_last` then (None: keep all).

    Args:
        path: from `begin_checkpoint`, on one rank.

    Raises:
        ValueError: where this rank does not see that folder.
    """

    def __init__(self, path: Path, keep_last: int | None) -> None:
        if not path.is_dir():
            raise ValueError(
                f"{path.parent.absolute()} on {platform.node()} is not the folder that rank 0 saves to, which is on "
                "another disk: give a folder that all ranks can reach."
            )
        self._target = path.with_name(path.name.partition(".")[0])
        self._keep_last = keep_last
        super().__init__(path, per_thread_copy_ahead=0)  # more takes a GPU where ranks compute on the CPU, for no gain

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _cause(error) from error

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        written, folder = Path(self.path), self._target.parent
        with open(written / ".metadata", "r+b") as file:
            file.write(_checksum(file.read()))
            file.flush()
            os.fsync(file.fileno())
        _sync(written)
        written.rename(self._target)
        _sync(folder)
        if self._keep_last is not None:
            for path in list(checkpoints_in(folder).values())[: -self._keep_last]:
                _remove(path)


def write_tensors(writer: Writer, tensors: dict[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write a checkpoint, all ranks of the group together; of tensors that several have, one writes each.

    Raises:
        RuntimeError: on every rank, where it fails on one.
    """
    with ExitStack() as stack:
        if group is None:  # one process needs no process group
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "torch.distributed is ")
        try:
            planner = DefaultSavePlanner(flatten_state_dict=False)
            with collective(EXCHANGE):
                save(tensors, storage_writer=writer, planner=planner, process_group=group)
        except CheckpointException as error:
            rank, (failure, _) = next(iter(error.failures.items()))
            remedy = (
                " The disk, or what you may use of it, is full: make room, or keep fewer with keep_last."
                if is_disk_full(failure)
                else ""
            )
            raise RuntimeError(
                f"saving to {Path(writer.path).parent} failed on rank {rank} ({failure}). What was saved before is "
                f"untouched.{remedy}"
            ) from None


def _cause(error: BaseException) -> BaseException:
    """What the system said when writing failed. torch speaks of positions in a file then."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def _checksum(data: bytes) -> bytes:
    return b"crc32 %08x" % zlib.crc32(data)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk. Not every system opens folders."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


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
            if data[end:] not in (b"", _checksum(data[:end])):  # it is empty where torch wrote it alone
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
