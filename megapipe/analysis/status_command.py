"""`megapipe status`: where every rank of a running job is, also while it hangs.

It reads what the helper threads of the ranks write into the job's store every few seconds, and asks them for nothing.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path
from typing import Any

from .text import print_table, say

NUM_LATE = 3  # signs of life that a rank leaves out until the table calls it silent
HEADINGS = ("rank", "replica", "pipeline rank", "step", "at", "for", "waits for", "last sign", "process")


def status(args: argparse.Namespace) -> None:
    address = args.address or _address_in(dict(os.environ)) or _address_of_ranks_here()
    _check_address(address)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # or a service that is no store gets pages of stack traces
    from ..failures import TIMING, read_positions

    positions = _within(TIMING.for_status, address, read_positions)
    now = time.time()
    rows = [_row(rank, position, now, NUM_LATE * TIMING.beat) for rank, position in enumerate(positions)]
    print_table(dict(zip(HEADINGS, zip(*rows))), left=HEADINGS, may_go=("process", "replica", "step"))
    for rank in _holding_up(positions):
        at, seconds, life = (rows[rank][column] for column in (4, 5, 7))
        say(f"held up by rank {rank}, at {at} for {seconds}, last sign of life: {life}")
    print(f"megapipe status {address}")


def _check_address(address: str) -> None:
    """Raises ValueError where nothing listens: torch's store tries again for seconds, and tells of each try."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the address of a job's store is HOST:PORT, like MASTER_ADDR:MASTER_PORT, got {address!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"nothing answers at {address} ({error}): check that the job runs, and that this is its MASTER_ADDR and "
            "MASTER_PORT, which this host can reach."
        ) from None


def _within(seconds: float, address: str, ask: Callable[[str], Any]) -> Any:
    """The answer of a store. Raises ValueError where none comes: torch waits for ever for one that says nothing."""
    answer: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            answer.set_result(ask(address))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(seconds)
    except futures.TimeoutError:
        raise ValueError(
            f"what listens at {address} does not answer as a job's store within {seconds:g} s: check that this is the "
            "job's MASTER_ADDR and MASTER_PORT, and that its first rank is not stopped."
        ) from None


def _row(rank: int, position: dict[str, Any] | None, now: float, late: float) -> tuple[str, ...]:
    if position is None:
        return (str(rank), "", "", "", "still to begin any step", "", "", "", "")
    awaited, peer = position.get("awaited"), position.get("peer")
    silence = max(0.0, now - position["time"])
    return (
        str(rank),
        str(position.get("replica", "")),
        str(position.get("pipeline_rank", "")),
        str(position.get("step", "")),
        position["at"] or "outside any step",
        f"{max(0.0, now - position['since']):.0f} s",
        (awaited or "") + (f" from rank {peer}" if awaited and peer is not None else ""),
        f"{silence:.0f} s ago" + (", silent" if silence > late else ""),
        f"{position['pid']} on {position['host']}",
    )


def _holding_up(positions: list[dict[str, Any] | None]) -> list[int]:
    """The ranks that others wait for, and that wait for none themselves."""
    waiting = {rank for rank, one in enumerate(positions) if one is not None and one.get("awaited")}
    awaited = {positions[rank]["peer"] for rank in waiting}  # type: ignore[index]
    return sorted(awaited - waiting - {None})


def _address_in(environment: dict[str, str]) -> str | None:
    if "MASTER_ADDR" in environment and "MASTER_PORT" in environment:
        return f"{environment['MASTER_ADDR']}:{environment['MASTER_PORT']}"
    return None


def _address_of_ranks_here() -> str:
    """The address of the job whose ranks this user runs on this host.

    Raises:
        ValueError: there is none, or several.
    """
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = file.read_bytes().decode(errors="replace").split("\0")
        except OSError:  # another user's, or it has ended meanwhile
            continue
        environment = dict(entry.partition("=")[::2] for entry in entries)
        if "RANK" in environment and (address := _address_in(environment)) is not None:
            found.add(address)
    if not found:
        raise ValueError("no rank of a job runs on this host: pass HOST:PORT, MASTER_ADDR and MASTER_PORT of the job.")
    if len(found) > 1:
        raise ValueError(f"ranks of several jobs run on this host: pass one of {', '.join(sorted(found))}.")
    return found.pop()
