"""torch.distributed's store may fall silent: its process stands still, or its host or the network to it is gone."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from models import build, forward_step, run
from ranks import RankPool
from torch.distributed.distributed_c10d import _get_default_store

from megapipe import PipelineError
from megapipe.failures import store_thread, world


class Cable:
    """What a rank sends to the store, and what comes back, goes through here; it may be pulled out and put in again."""

    def __init__(self, host: str, port: int) -> None:
        self._listener = socket.create_server(("localhost", 0))
        self.port: int = self._listener.getsockname()[1]
        self._store = (host, port)
        self._is_in = threading.Event()
        self._is_in.set()
        threading.Thread(target=self._accept, daemon=True).start()

    def pull_out(self) -> None:
        self._is_in.clear()

    def put_in(self) -> None:
        self._is_in.set()

    def _accept(self) -> None:
        while True:
            here, _ = self._listener.accept()
            there = socket.create_connection(self._store)
            for source, target in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(source, target), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        while data := source.recv(65536):
            self._is_in.wait()
            target.sendall(data)
        target.close()


@contextmanager
def connected_by_cable(rank: int, name: str) -> Iterator[Cable]:
    """The process groups of two ranks anew, with a cable from each to the store."""
    root = world._root(_get_default_store())
    cable = Cable(root.host, root.port)
    dist.destroy_process_group()
    store = dist.PrefixStore(f"by cable, {name}", dist.TCPStore("localhost", cable.port, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    limits = {"SLICE": 0.1, "HELPER_LIMIT": 0.3, "LIMIT": 1.0}
    with mock.patch.multiple(world, BEAT=0.1, PATIENCE=0.5, LIMIT=1.0), mock.patch.multiple(store_thread, **limits):
        yield cable
        cable.put_in()


def slow_step(data_iterator: Any, model: Any) -> Any:
    time.sleep(3)
    return forward_step(data_iterator, model)


def a_rank_is_cut_off(rank: int, where: str) -> str:
    with connected_by_cable(rank, where) as cable:
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
        time.sleep(0.5)  # signs of life
        if rank == 1:
            cable.pull_out()
        num_microbatches, step = 4, slow_step if rank == 0 else forward_step
        if where == "the store":  # with other arguments than in the step before, it asks for those of the others
            num_microbatches, step = 2, forward_step
        with pytest.raises(PipelineError) as caught:
            run("1f1b", chunks, num_microbatches, forward_step_func=step)
        return str(caught.value)


@pytest.mark.parametrize("where", ["a message", "the store"])
def test_a_rank_that_is_cut_off_from_the_store_ends(ranks: RankPool, where: str) -> None:
    """The helper thread waited for the store, and so could not end the main thread's waits. Both waited until the
    kernel gave up the connection, a quarter of an hour after a host had gone, and forever for a process that stood
    still."""
    messages = ranks.run(2, a_rank_is_cut_off, where)
    assert re.search(r"torch\.distributed's store has not answered for [\d.]+ s: the process that", messages[1])
    assert "rank 1" in messages[0]


def the_store_comes_back(rank: int) -> None:
    with connected_by_cable(rank, "back") as cable:
        chunks = build("1f1b", 2, 4)
        run("1f1b", chunks, 4)
        cable.pull_out()
        for _ in range(20):
            run("1f1b", chunks, 4)
            time.sleep(0.1)
        silence = store_thread.seconds_silent()
        cable.put_in()
        run("1f1b", chunks, 2)  # with other arguments: this asks the store
        assert silence >= 1.0
        assert store_thread.seconds_silent() < silence


def test_training_goes_on_while_the_store_is_silent(ranks: RankPool) -> None:
    """Its process may have been stopped for a minute: nothing that trains needs it."""
    ranks.run(2, the_store_comes_back)


def test_errors_of_the_store_come_back() -> None:
    with pytest.raises(KeyError, match="no such thing"):
        store_thread.ask(lambda: {}["no such thing"])
