"""Copies of the last state in the memory of the nodes: a lost rank costs the steps since the last copy.

A folder in memory, as in /dev/shm, outlives the processes of its node. A copy is a checkpoint whose files lie apart:
each in the folder of the node where it was written, and once more on the next node. So it is whole as long as no two
neighbours are lost at once. Ranks that start anew bring the files that they need to their node, and read them as those
of any checkpoint, checksums included.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..failures import AllRanks
from .files import (
    EXCHANGE,
    INCOMPLETE,
    DamagedError,
    Reader,
    Writer,
    checkpoints_in,
    is_name_of_run,
    remove_incomplete,
    write_tensors,
)
from .folder_lock import FolderLock, lock_folder

__all__ = ["MemoryCopies"]

T = TypeVar("T")

LARGEST_MESSAGE = 2**28  # bytes


class Transfer(NamedTuple):
    """A file's way from the memory of one node to that of another."""

    name: str
    size: int
    source: int
    destination: int


class MemoryCopies:
    """The copies of one run. Every rank makes one and calls its methods alike, each from one thread at a time.

    Args:
        folder: of this rank's node, the same for all its ranks, and this run's alone.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.agreement = AllRanks(EXCHANGE)
        self.folder = Path(folder)
        self._lock: FolderLock | None = None
        place = ("", 0, 0)
        with self.agreement.same_errors():
            self.folder.mkdir(parents=True, exist_ok=True)
            found = self.folder.stat()
            place = (socket.gethostname(), found.st_dev, found.st_ino)
        places = self._gather(place)
        self._nodes = [[rank for rank, other in enumerate(places) if other == node] for node in dict.fromkeys(places)]
        self._node = next(number for number, ranks in enumerate(self._nodes) if self.agreement.rank in ranks)
        self._is_first = self._nodes[self._node][0] == self.agreement.rank  # of its node

    def claim(self, run: str, step: int) -> None:
        """Remove what other runs left, and the copies of this step and later ones, from which a restart would go on.

        Raises:
            ValueError: on every rank, where another run uses the folder of a node.
        """
        with self.agreement.same_errors():
            if self._is_first:
                self._clear(run)
                self._remove(run, lambda other: other >= step)

    def write(self, run: str, step: int, tensors: dict[str, Tensor]) -> None:
        """Write a copy, and remove those before it once the new one is whole.

        Args:
            run: names the run: copies of others are none of its business, and are removed.
        """
        target = self.folder / run / f"step_{step:08d}"
        path = target.with_name(target.name + INCOMPLETE)
        with self.agreement.same_errors():
            if self._is_first:
                self._clear(run)
        write_tensors(Writer(path), tensors, self.agreement.group)
        names_by_rank = self._gather(sorted(file.name for file in path.glob("*.distcp")))
        before = self._nodes[self._node - 1][0]
        self.bring(path, names_by_rank[before])
        self._share_contents(path, 0)
        with self.agreement.same_errors():
            if self._is_first:
                shutil.rmtree(target, ignore_errors=True)
                path.rename(target)
        with self.agreement.same_errors():
            if self._is_first:
                self._remove(run, lambda other: other != step)

    def find(self, run: str) -> list[int]:
        """The steps of which a whole copy is there, on all nodes together, the last first."""
        here: dict[int, tuple[set[str], set[str]]] = {}
        for step, path in checkpoints_in(self.folder / run).items() if self._is_first else ():
            here[step] = ({file.name for file in path.glob("*.distcp")}, _listed(path))
        by_rank = self.agreement.gather(here)
        whole = []
        for step in {step for one in by_rank for step in one}:
            parts = [one[step] for one in by_rank if step in one]
            needed = set().union(*(listed for _, listed in parts))
            if needed and needed <= set().union(*(there for there, _ in parts)):
                whole.append(step)
        return self.agreement.broadcast(sorted(whole, reverse=True))

    def open(self, run: str, step: int) -> Path:
        """The folder of a whole copy, with its list of contents on every node."""
        path = self.folder / run / f"step_{step:08d}"
        with self.agreement.same_errors():
            path.mkdir(parents=True, exist_ok=True)
        self._share_contents(path, self._gather(bool(_listed(path))).index(True))
        return path

    def bring(self, path: Path, wanted: Iterable[str]) -> None:
        """Copy files that this rank wants and its node has not from nodes that have them.

        Args:
            path: of a copy, on this node.
        """
        here = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
        ranks = self.agreement.gather((here, set(wanted)))
        transfers = self.agreement.broadcast(_transfers(self._nodes, ranks) if ranks else [])
        rank = self.agreement.rank
        files = {
            transfer: path / transfer.name if transfer.source == rank else path / (transfer.name + INCOMPLETE)
            for transfer in transfers
            if rank in (transfer.source, transfer.destination)
        }
        incoming = [transfer for transfer in files if transfer.destination == rank]
        with self.agreement.same_errors():  # where memory does not suffice, it is said before anybody sends
            for transfer in incoming:
                with open(files[transfer], "wb") as file:
                    os.posix_fallocate(file.fileno(), 0, transfer.size)
        with self.agreement.same_errors():
            # Each rank keeps to the one order of all transfers, once as their source and once as their destination: so
            # the first that is not through can always go on.
            with ThreadPoolExecutor(1) as sender:
                outgoing = [transfer for transfer in files if transfer.source == rank]
                sent = sender.submit(self._send, [(files[one], one.size, one.destination) for one in outgoing])
                for transfer in incoming:
                    for message in _messages(files[transfer], transfer.size, shared=True):
                        dist.recv(message, src=transfer.source, group=self.agreement.group)
                sent.result()
            for transfer in incoming:
                files[transfer].rename(path / transfer.name)

    def _send(self, files: list[tuple[Path, int, int]]) -> None:
        for path, size, destination in files:
            for message in _messages(path, size, shared=False):
                dist.send(message, dst=destination, group=self.agreement.group)

    def _clear(self, run: str) -> None:
        """On the first rank of a node: remove what other runs and interrupted saves left."""
        self._lock = lock_folder(self.folder)
        for other in self.folder.iterdir():
            if is_name_of_run(other.name) and other.name != run:
                shutil.rmtree(other)
        (self.folder / run).mkdir(exist_ok=True)
        remove_incomplete(self.folder / run)

    def _remove(self, run: str, is_unwanted: Callable[[int], bool]) -> None:
        for step, path in checkpoints_in(self.folder / run).items():
            if is_unwanted(step):
                shutil.rmtree(path)

    def _share_contents(self, path: Path, source: int) -> None:
        """Put one rank's list of contents on every node."""
        contents = (path / ".metadata").read_bytes() if self.agreement.rank == source else b""
        contents = self.agreement.broadcast(contents, source)
        with self.agreement.same_errors():
            if self._is_first and not _listed(path):
                (path / ".metadata").write_bytes(contents)

    def _gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        return self.agreement.broadcast(self.agreement.gather(value))


def _listed(path: Path) -> set[str]:
    """The files in a copy's list of contents; none where it is missing or damaged, since every node has one."""
    try:
        return Reader(path).files()
    except DamagedError:
        return set()


def _transfers(nodes: list[list[int]], ranks: list[tuple[dict[str, int], set[str]]]) -> list[Transfer]:
    """The files that nodes lack, each from a node that has it. The ranks of a node take turns.

    Args:
        nodes: the ranks of each.
        ranks: of each rank, the files on its node with their sizes, and those it wants.
    """
    holders = {name: (node, size) for node in reversed(nodes) for name, size in ranks[node[0]][0].items()}
    transfers = []
    for node in nodes:
        wanted = set().union(*(ranks[rank][1] for rank in node)) - ranks[node[0]][0].keys()
        for number, name in enumerate(sorted(wanted)):
            holder, size = holders[name]
            transfers.append(Transfer(name, size, holder[number % len(holder)], node[number % len(node)]))
    return transfers


def _messages(path: Path, size: int, shared: bool) -> list[Tensor]:
    """A file's memory, in parts; a shared one can be written to."""
    memory = torch.from_file(str(path), shared=shared, size=size, dtype=torch.uint8)
    return [memory[begin : begin + LARGEST_MESSAGE] for begin in range(0, size, LARGEST_MESSAGE)]
