"""What all ranks of a large job ask of its store: in their first step, while they compute, and when one fails.

    python -m benchmarks.large_jobs --ranks 1024 8192

Each rank has a connection, and does with it what a rank does: it agrees on the arguments of a step, looks for failures
and gives signs of life. Ranks are threads of a few processes, which share the cores of this machine with the store: so
wall time is mostly theirs. In a job they have cores of their own, and what they wait for is the store.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

from torch.distributed import PrefixStore, TCPStore

from megapipe.failures import Agreement, Board, InterruptibleStore, Mailbox, Watchdog, helper_thread
from megapipe.failures.board import Failure

from .options import options
from .tables import save_table

PIPELINE = 16
"""Ranks of each."""
HEADER = (
    "ranks | all have agreed, s | of that the store, s | the store meanwhile | all have heard, s | of that the store, s"
)


def main() -> None:
    args = options(ranks=[1024, 8192], processes=8, seconds=10.0)  # between the first step and the failure
    notes = (
        f"Pipelines of {PIPELINE}. *agreed*: from the begin of the first step until all ranks know that all were "
        "called alike, without the looks of helper threads. *heard*: from a rank's failure until all ranks know of it; "
        "each looks once a second. *the store*: processor time of the process that holds it; *meanwhile*: its share of "
        "a core while all compute and look. "
        f"{args.processes} processes play all ranks, on {os.cpu_count()} cores that they share with the store."
    )
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the store has a file for each connection
    rows = [row(num_ranks, args.processes, args.seconds) for num_ranks in args.ranks]
    save_table("large-jobs", "Large jobs: the first step, and a failure", HEADER, rows, notes, args.folder)


def row(num_ranks: int, num_processes: int, seconds: float) -> list[str]:
    context = multiprocessing.get_context("spawn")
    clock, answers = multiprocessing.Pipe()
    processes = [context.Process(target=serve, args=(answers,), daemon=True)]
    processes[0].start()
    port = clock.recv()
    players = []
    for first in range(num_processes):
        player, end = multiprocessing.Pipe()
        ranks = range(first, num_ranks, num_processes)
        processes.append(context.Process(target=play, args=(end, port, ranks, num_ranks), daemon=True))
        players.append(player)
    for process in processes[1:]:
        process.start()
    collect(players)  # all are connected
    agreed = timed(clock, lambda: collect(tell(players, "agree")))
    idle = timed(clock, lambda: time.sleep(seconds))
    heard = timed(clock, lambda: collect(tell(players, "fail")))
    for process in processes:
        process.kill()
    times = [f"{agreed.wall:.2f}", f"{agreed.store:.2f}", f"{100 * idle.store / idle.wall:.0f} % of a core"]
    return [str(num_ranks), *times, f"{heard.wall:.2f}", f"{heard.store:.2f}"]


def serve(connection: Connection) -> None:
    """Hold a store, and tell this process's processor time when asked."""
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    with suppress(EOFError):  # the benchmark has ended
        while True:
            connection.recv()
            connection.send(time.process_time())


class Times(NamedTuple):
    wall: float
    store: float


def timed(clock: Connection, function: Callable[[], None]) -> Times:
    def store_time() -> float:
        clock.send(None)
        return float(clock.recv())

    store, wall = store_time(), time.monotonic()
    function()
    return Times(time.monotonic() - wall, store_time() - store)


def tell(players: list[Connection], what: str) -> list[Connection]:
    for player in players:
        player.send(what)
    return players


def collect(players: list[Connection]) -> None:
    for player in players:
        player.recv()


def play(connection: Connection, port: int, ranks: range, num_ranks: int) -> None:
    """Some of the ranks of a job, in one process."""
    threading.stack_size(256 * 1024)
    sys.stderr = io.StringIO()  # where each of them says that it aborts its process groups
    job = SimpleNamespace(group=SimpleNamespace(WORLD=Group(0, num_ranks)))
    mock.patch("megapipe.failures.helper_thread.dist", job).start()
    mock.patch("megapipe.failures.board.abort_process_groups").start()
    mock.patch("megapipe.failures.store._lock", nullcontext()).start()  # each rank has a connection of its own
    mock.patch("megapipe.failures.board.StoreAlarm", NoAlarm).start()  # which is a thread of each rank's own process
    tasks: list[Callable[[], None]] = []
    begin_tasks = mock.patch.object(helper_thread, "begin", tasks.append)
    begin_tasks.start()
    with ThreadPoolExecutor(64) as pool:  # a slow name server makes some wait for seconds
        stores = pool.map(lambda rank: TCPStore("127.0.0.1", port, wait_for_workers=False), ranks)
        members = [Member(rank, num_ranks, store) for rank, store in zip(ranks, stores)]
    connection.send(None)
    connection.recv()
    threads = [threading.Thread(target=member.begin_step) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    connection.send(None)
    begin_tasks.stop()
    for task in tasks:
        helper_thread.begin(task)
    connection.recv()
    if 0 in ranks:
        members[0].board.publish(Failure("rank 0 failed", members[0].name))
    while any(member.board.failure is None for member in members):
        time.sleep(0.02)
    connection.send(None)
    with suppress(EOFError):
        connection.recv()


class Group(NamedTuple):
    """Stands for torch's process group of all ranks."""

    number: int
    num_ranks: int

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.num_ranks


class NoAlarm:
    def __init__(self, *args: object) -> None:
        pass

    def end(self) -> None:
        pass


class Member:
    """What one rank has of megapipe, without torch.distributed around it."""

    def __init__(self, rank: int, num_ranks: int, store: TCPStore) -> None:
        pipeline, pp_rank = divmod(rank, PIPELINE)
        self.board = Board(rank, num_ranks, store, has_ended=lambda: False)
        self.name = f"pipeline {pipeline}"
        own = InterruptibleStore(PrefixStore(self.name, store), pp_rank, PIPELINE, lambda: self._watchdog.check())
        ranks = range(pipeline * PIPELINE, (pipeline + 1) * PIPELINE)
        self._watchdog = Watchdog(self.board, self.name, ranks, own, lambda: None, lambda: None, lambda: False)
        self._mailbox = Mailbox(own, self._watchdog)
        self._agreement = Agreement(self._mailbox, self._watchdog)

    def begin_step(self) -> None:
        """The part of it that all ranks make together."""
        with self._watchdog.step():
            self._agreement.agree({f"argument {number}": "as on the other ranks" for number in range(16)})


if __name__ == "__main__":
    main()
