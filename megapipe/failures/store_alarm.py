"""A store that does not answer holds up the helper thread too, and with it all that could tell the main thread.

The process that holds the store stands still, or its host is gone, or the network to it: requests do not return until
the kernel gives up the connection, after a quarter of an hour or never. So a second thread watches the helper thread.
It asks the store nothing while all is well.
"""

from __future__ import annotations

import atexit
import datetime
import os
import socket
import threading
from collections.abc import Callable, Container
from contextlib import suppress
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any

from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import Store

from . import helper_thread
from .timing import TIMING


class StoreAlarm:
    """Cuts this process's connections to a silent store: then all requests that wait for it raise.

    The helper thread may also wait for its turn, while torch itself waits in the store for another rank, as for the
    id of a communicator of NCCL. So the store is asked over another connection before it counts as silent.

    Args:
        store: without the prefixes by which torch and torchrun part it. One without an address is not watched.
        gives_up: called every few seconds while the store is silent, with the seconds since its last answer. Returns
            whether this rank gives it up, and has told its main thread so.
    """

    def __init__(self, store: Store, gives_up: Callable[[float], bool]) -> None:
        self._store: Any = store
        self._gives_up = gives_up
        self._silence = 0.0  # counted in looks: this process may have been stopped together with the store's
        self._question: threading.Thread | None = None
        self._has_ended = threading.Event()
        if isinstance(store, TCPStore):
            self._addresses = _addresses_of(store.host, store.port)  # now, while names of hosts can be looked up
            threading.Thread(target=self._watch, name="megapipe-store-alarm", daemon=True).start()

    def end(self) -> None:
        self._has_ended.set()

    def look(self) -> bool:
        """Returns whether this rank has given the store up."""
        if helper_thread.seconds_busy() < TIMING.until_alarm:
            self._silence = 0.0
            return False
        self._silence += TIMING.until_alarm
        if self._question is None or not self._question.is_alive():
            if self._question is None:
                atexit.register(self._await_answer)
            self._question = threading.Thread(target=self._ask, name="megapipe-store-question", daemon=True)
            self._question.start()
        return self._gives_up(self._silence)

    def _watch(self) -> None:
        while not self._has_ended.wait(TIMING.until_alarm):
            if self.look():
                _cut_connections(self._addresses)
                return

    def _ask(self) -> None:
        with suppress(RuntimeError):  # the store cannot be reached
            limit = datetime.timedelta(seconds=TIMING.until_alarm)
            store = TCPStore(self._store.host, self._store.port, wait_for_workers=False, timeout=limit)
            store.check(["anything"])
            self._silence = 0.0

    def _await_answer(self) -> None:
        """A thread that comes back from the store when the interpreter goes brings the process down with it."""
        assert self._question is not None
        self._question.join(TIMING.until_alarm)


Address = tuple[IPv4Address | IPv6Address, int]


def _addresses_of(host: str, port: int) -> set[Address]:
    """Where the store listens. None where its host has no address."""
    with suppress(OSError):
        return {_address(found[4]) for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    return set()


def _address(pair: Any) -> Address:
    """The address of a socket, of which IPv6 has longer ones, and others for those of IPv4."""
    address = ip_address(str(pair[0]).partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address, pair[1]


def _cut_connections(addresses: Container[Address]) -> None:
    """All of this process to the store: nobody else listens at its address and port."""
    limit = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # with one, all sockets looked at would no longer block
    for descriptor in map(int, os.listdir("/dev/fd")):
        with suppress(OSError), _socket_of(descriptor) as connection:  # no connection, or closed meanwhile
            peer = connection.getpeername()
            if isinstance(peer, tuple) and _address(peer) in addresses:
                connection.shutdown(socket.SHUT_RDWR)
    socket.setdefaulttimeout(limit)


def _socket_of(descriptor: int) -> socket.socket:
    """Another end of a socket, of its own family: an address read as that of another is garbage. Raises OSError where
    it is none."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
