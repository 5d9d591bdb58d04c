"""The files of checkpoints: each complete or not there, and read without executing anything.

A checkpoint is a folder of torch.distributed.checkpoint in a run's folder. It is written under another name and renamed
when everything is on the disk: whenever a run dies, what bears a checkpoint's name is whole. It holds tensors only; its
list of contents, a pickle, is read with an allow-list of the classes that torch writes there. What is read is what was
written, or refused: torch writes checksums with its tensors but never looks at them, and the list of contents gets one
at its end, where torch does not read.
"""

from __future__ import annotations

import io
import os
import pickle
import re
import shutil
import zipfile
import zlib
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as contents
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

__all__ = [
    "Reader",
    "Writer",
    "checkpoints_in",
    "deserialise",
    "find_checkpoint",
    "holds_checkpoint",
    "latest_checkpoint",
    "remove_incomplete",
    "serialise",
]

INCOMPLETE = ".incomplete"


def checkpoints_in(folder: str | os.PathLike[str]) -> dict[int, Path]:
    """The complete checkpoints of a run's folder by step, in the order of the steps."""
    if not Path(folder).is_dir():
        return {}
    matches = ((re.fullmatch(r"step_(\d{8,})", path.name), path) for path in Path(folder).iterdir())
    return dict(sorted((int(match[1]), path) for match, path in matches if match))


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The complete checkpoint with the highest step in a run's folder; None where there is none."""
    return next(reversed(checkpoints_in(folder).values()), None)


def holds_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether `find_checkpoint` finds one."""
    return _is_checkpoint(path) or latest_checkpoint(path) is not None


def _is_checkpoint(path: str | os.PathLike[str]) -> bool:
    return (Path(path) / ".metadata").is_file()


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """`path` itself where it is a checkpoint, else the latest one in it. Raises ValueError where there is none."""
    if _is_checkpoint(path):
        return Path(path)
    if (latest := latest_checkpoint(path)) is not None:
        return latest
    what = "holds no complete checkpoint" if Path(path).is_dir() else "is no folder"
    raise ValueError(
        f"{path} {what}: give a folder that was saved to, with a folder such as step_00000100 in it, or that one."
    )


def remove_incomplete(folder: str | os.PathLike[str]) -> None:
    """What saves that were interrupted left behind. Nobody may be saving there."""
    for path in Path(folder).glob(f"*{INCOMPLETE}"):
        shutil.rmtree(path)


class Writer(FileSystemWriter):
    """Writes one checkpoint of a run's folder. Rank 0 makes it appear, and removes all but the last `keep_last` then
    (None: keep all)."""

    def __init__(self, folder: Path, step: int, keep_last: int | None) -> None:
        self._target = folder / f"step_{step:08d}"
        self._keep_last = keep_last
        super().__init__(self._target.with_name(self._target.name + INCOMPLETE))

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What is to be written in the background. A copy also of what is in the host's memory already, which torch
        2.6 would hand on as it is, to be changed by the next step."""
        return {key: tensor.detach().to("cpu", copy=True) for key, tensor in state_dict.items()}

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
                # Renamed first: half of a checkpoint must not bear the name of a whole one.
                shutil.rmtree(path.rename(path.with_name(path.name + INCOMPLETE)))


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


class Reader(FileSystemReader):
    """Reads a checkpoint on this rank alone.

    Raises ValueError where its list of contents is not what torch writes for tensors, or asks for anything else, and
    where files are damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
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
            raise ValueError(
                f"{path} is not a checkpoint that megapipe wrote, or it is damaged ({error}). Nothing of it was used."
            ) from error

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for index in dict.fromkeys(item.storage_index for item in plan.items):
            self._check_sums(self._metadata.storage_data[index])
        return super().read_data(plan, planner)

    def _check_sums(self, stored: _StorageInfo) -> None:
        """Raises BadZipFile where a bit has changed since it was written."""
        with open(Path(self.path) / stored.relative_path, "rb") as file:
            file.seek(stored.offset)
            archive = zipfile.ZipFile(io.BytesIO(file.read(stored.length)))
        for entry in archive.infolist():
            if entry.CRC:  # it is 0 where torch was told to compute none
                with archive.open(entry) as data:
                    while data.read(1 << 24):
                        pass

    def read(self, targets: dict[str, Tensor]) -> None:
        """Fill the tensors with what the checkpoint holds under their keys. Of DTensors each rank reads its shard."""
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        planner.set_up_planner(dict(targets), self._metadata, is_coordinator=True)
        self.set_up_storage_reader(self._metadata, is_coordinator=True)
        try:
            self.read_data(planner.create_local_plan(), planner).wait()
        except Exception as error:
            said = (str(error).splitlines() or [""])[0].partition(". ")[0]
            raise ValueError(
                f"{self.path} cannot be read ({type(error).__name__}: {said}): its files are damaged or missing. Load "
                "another checkpoint."
            ) from error

    def read_value(self, key: str) -> Any:
        """What `serialise` was given."""
        if key not in self.contents:
            raise ValueError(f"{self.path} has no {key}: it was not saved by a Checkpointer of megapipe.")
        what = self.contents[key]
        target = torch.empty(what.size, dtype=what.properties.dtype)
        self.read({key: target})
        return deserialise(target)


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
    """Anything of numbers, strings, lists, dicts and tensors as a tensor of bytes.

    Raises TypeError where it could not be read back without executing code. `what` names it in the error.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
        tensor = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
        deserialise(tensor)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        raise TypeError(
            f"{what} cannot be saved so that loading it executes no code: use numbers, strings, lists, dicts and "
            f"tensors, not {unknown[1] if unknown else str(error).splitlines()[0]}."
        ) from error
    return tensor


def deserialise(tensor: Tensor) -> Any:
    return torch.load(io.BytesIO(bytes(tensor.tolist())), weights_only=True)
