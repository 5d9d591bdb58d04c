"""torch.distributed's store may fall silent: its process stands still, or its host or the network to it is gone."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.models import build, forward_step, run
from tools.ranks import EXCUSES, RankPool, on_ranks
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelineError, clip_grad_norm_, parallel_state
from megapipe.failures import TIMING, board, helper_thread, positions
from megapipe.failures.store_alarm import StoreAlarm, _addresses_of, _cut_connections

LIMIT = 4.0
"""In place of a minute. A busy machine may let a rank stand still for a second or two."""


class Cable:
    """What a rank sends to the store, and what comes back, goes through here; it may be pulled out and put in again."""

    def __init__(self, store: tuple[str, int]) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.port: int = self._listener.getsockname()[1]
        self._store = store
        self._is_in = threading.Event()
        self._is_in.set()
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def pull_out(self) -> None:
        self._is_in.clear()

    def put_in(self) -> None:
        self._is_in.set()

    def cut(self) -> None:
        """As if the store's process had ended."""
        for end in self._ends:
            with suppress(OSError):  # it has
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.put_in()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(self._store)
            self._ends += [here, there]
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # the other direction's end
            while data := source.recv(65536):
                self._is_in.wait()
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


@contextmanager
def connected_by_cable(rank: int) -> Iterator[Cable]:
    """The process groups of two ranks anew, with a cable from each to the store."""
    root: Any = board._root(_get_default_store())
    cable = Cable((root.host, root.port))
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    by_cable = dist.TCPStore("localhost", cable.port, wait_for_workers=False)
    name = f"by cable {by_cable.add(f'cables of {rank}', 1)}"
    dist.init_process_group("gloo", store=dist.PrefixStore(name, by_cable), rank=rank, world_size=2)
    with mock.patch.multiple(TIMING, beat=LIMIT / positions.NUM_MISSED, until_abort=0.5, until_alarm=0.2):
        try:
            yield cable
        finally:
            cable.put_in()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            cable.close()
            EXCUSES.append("a store")  # a connection that was silent may still hold a process group


def a_rank_is_cut_off(rank: int, where: str, has_raised: Path) -> str:
    def step(data_iterator: Any, model: Any) -> Any:
        while where == "a message" and rank == 0 and not has_raised.exists():
            time.sleep(0.05)
        return forward_step(data_iterator, model)

    with connected_by_cable(rank) as cable:
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
        if rank == 1:
            cable.pull_out()

        def go_on() -> None:
            while where == "a collective" and rank == 0 and not has_raised.exists():
                time.sleep(0.05)
            if where == "a collective":
                clip_grad_norm_(chunks, 1.0)
            # With other arguments than in the step before, a rank asks the store for those of the others.
            run("1f1b", chunks, 2 if where == "the store" else 4, forward_step_func=step)

        with pytest.raises(PipelineError) as caught:
            go_on()
        has_raised.touch()
        if rank == 1:
            with pytest.raises(PipelineError, match=r"has ended with a failure .*: start all processes again"):
                run("1f1b", chunks, 4)
        return str(caught.value)


@pytest.mark.parametrize("where", ["a message", "the store", "a collective"])
def test_a_rank_that_is_cut_off_from_the_store_ends(ranks: RankPool, where: str, tmp_path: Path) -> None:
    """The helper thread waited for the store, and so could not end the main thread's waits. Both waited until the
    kernel gave up the connection, a quarter of an hour after a host had gone, and for ever for a process that stood
    still. In a collective it waited on, as the helper thread ended with the connection and never aborted the groups."""
    messages = ranks.run(2, a_rank_is_cut_off, where, tmp_path / "has raised")
    assert re.fullmatch(
        r"global rank 1 waits, and torch\.distributed's store has not answered for \d+ s: the process that holds it "
        r"stands still, or its host or network is gone\.",
        messages[1],
    )
    assert re.search("rank 1|lost its connection", messages[0])


def the_store_ends(rank: int) -> str:
    with connected_by_cable(rank) as cable:
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
        cable.cut()
        run("1f1b", chunks, 4)  # asks nobody
        with pytest.raises(PipelineError) as caught:
            run("1f1b", chunks, 2)
        return str(caught.value)


def test_a_store_whose_process_has_ended_is_named(ranks: RankPool) -> None:
    """All that ranks said when torchrun was killed was torch's "Broken pipe"."""
    for message in ranks.run(2, the_store_ends):
        assert re.fullmatch(
            r"torch\.distributed's store is gone \(.+\): the process that held it, torchrun or a rank, was killed or "
            r"has ended, or its host is gone\.",
            message,
        )


@on_ranks(2)
def test_training_goes_on_while_the_store_is_silent(rank: int) -> None:
    """Its process may have been stopped for a minute: nothing that trains needs it."""
    with connected_by_cable(rank) as cable:
        chunks = build("1f1b", 2, 4)
        goes_on, end = torch.ones(1), time.monotonic() + 1.5 * LIMIT
        run("1f1b", chunks, 4)
        dist.broadcast(goes_on, 0)  # this connects the ranks, by the store
        cable.pull_out()
        while goes_on:
            time.sleep(0.3)
            run("1f1b", chunks, 4)
            goes_on.fill_(time.monotonic() < end)
            dist.broadcast(goes_on, 0)  # with clocks of their own, one rank would wait in a step more
        cable.put_in()
        run("1f1b", chunks, 2)  # with other arguments: this asks the store


@on_ranks(2)
def test_a_store_in_which_torch_waits_is_not_silent(rank: int) -> None:
    """torch has one connection to the store. While it waits there for a slow rank, nothing else is answered."""
    with connected_by_cable(rank):
        store = _get_default_store()
        chunks = build("1f1b", 2, 4)

        def step(data_iterator: Any, model: Any) -> Any:
            store.get("an id")  # as for a communicator of NCCL
            return forward_step(data_iterator, model)

        try:
            run("1f1b", chunks, 4)
            if rank == 1:
                time.sleep(1.5 * LIMIT)
        finally:  # nothing else ends the other's wait
            if rank == 1:
                store.set("an id", "1")
        run("1f1b", chunks, 4, forward_step_func=step)


def test_time_in_which_the_process_stood_still_is_no_silence() -> None:
    """A job that was stopped as a whole, its store a moment before a rank, was given up when it went on: the rank's
    clock had run meanwhile, and the answer was still to come."""
    told: list[float] = []
    alarm = StoreAlarm(HashStore(), lambda silence: told.append(silence) is not None)
    with (
        mock.patch.object(helper_thread, "seconds_busy", return_value=100.0),
        mock.patch.object(alarm, "_ask"),
        mock.patch.object(time, "monotonic", return_value=time.monotonic() + 100),
    ):
        alarm.look()
    assert told == [TIMING.until_alarm]


def test_connections_to_other_hosts_are_left() -> None:
    """All connections to the port number of the store were cut, also those to other hosts. Another library's server may
    well listen there."""
    with socket.create_server(("127.0.0.1", 0)) as store:
        port = store.getsockname()[1]
        with (
            socket.create_server(("127.0.0.2", port)),
            socket.create_connection(("127.0.0.1", port)) as ours,
            socket.create_connection(("127.0.0.2", port)) as theirs,
        ):
            _cut_connections(_addresses_of("localhost", port))
            assert ours.recv(1) == b""
            theirs.setblocking(False)
            with pytest.raises(BlockingIOError):
                theirs.recv(1)
