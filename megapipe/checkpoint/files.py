"""The files of checkpoints: each complete or not there.

A checkpoint is a folder of torch.distributed.checkpoint in a run's folder. It is written under another name and renamed
when everything is on the disk: whenever a run dies, a folder with a checkpoint's name is complete. It holds tensors
only. Its list of contents gets a checksum at its end, where torch does not read. A data file begins with the name of
its checkpoint, which the list of contents has too: so nobody takes files of two checkpoints for one.
"""

from __future__ import annotations

import io
import os
import platform
import re
import secrets
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..failures import collective, is_disk_full

OF_MEGAPIPE = "megapipe "
EXCHANGE = "the saving or loading of a checkpoint"
INCOMPLETE = ".incomplete"
DAMAGED = ".damaged"


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


def name_of(step: int) -> str:
    """The name of a checkpoint in a run's folder."""
    return f"step_{step:08d}"


def begin_checkpoint(checkpoint: Path) -> Path:
    """An empty folder to write a checkpoint into, under a name that no other run has. `Writer` makes it appear."""
    path = _incomplete(checkpoint)
    path.mkdir()
    return path


def _incomplete(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.{secrets.token_hex(4)}{INCOMPLETE}")


UNDER_WAY: set[Path] = set()
"""What this process writes in the background."""


def remove_incomplete(folder: str | os.PathLike[str], name: str = r"step_\d{8,}") -> None:
    """What saves that were interrupted left behind. No other process may save there.

    Args:
        name: of the checkpoints, as a regular expression.
    """
    for path in set(Path(folder).glob(f"*{INCOMPLETE}")) - UNDER_WAY:
        if re.fullmatch(rf"{name}(\.[0-9a-f]{{8}})?{INCOMPLETE}", path.name) and path.is_dir():
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


class _MarkedFiles(FileSystem):
    """Where a checkpoint is written: a data file begins with a line that says which one it is, of which checkpoint."""

    def __init__(self, save_id: str) -> None:
        super().__init__()
        self._save_id = save_id

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if not Path(path).name.startswith("."):
                stream.write(mark_of(self._save_id, Path(path).name))
            yield stream


def mark_of(save_id: str, name: str) -> bytes:
    return f"{save_id} {name}\n".encode()


class Writer(FileSystemWriter):
    """Writes this rank's part of one checkpoint. Rank 0 writes the list of contents too, with its checksum, and makes
    the checkpoint appear, in the place of one of the same name. Then it removes all but the last `keep_last` of a run's
    folder (None: keep all).

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
        self._target = path.with_name(path.name.rsplit(".", 2)[0])
        self._keep_last = keep_last
        super().__init__(path, per_thread_copy_ahead=0)  # more takes a GPU where ranks compute on the CPU, for no gain
        self.save_id = f"{OF_MEGAPIPE}{path.stem}"  # torch writes it into the list of contents
        self.fs = _MarkedFiles(self.save_id)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            raise _cause(error) from error

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        super().finish(metadata, results)
        written, folder = Path(self.path), self._target.parent
        with open(written / ".metadata", "r+b") as file:
            file.write(checksum_of(file.read()))
            file.flush()
            os.fsync(file.fileno())
        _sync(written)
        if self._target.exists():
            _remove(self._target)
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
        finally:
            UNDER_WAY.discard(Path(writer.path))


def _cause(error: BaseException) -> BaseException:
    """What the system said when writing failed. torch speaks of positions in a file then."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    return cause or error


def checksum_of(data: bytes) -> bytes:
    return b"crc32 %08x" % zlib.crc32(data)


def _sync(folder: Path) -> None:
    """Bring the names in a folder to the disk. Not every system opens folders."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
