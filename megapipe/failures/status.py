"""The command `megapipe status`: where every rank of a running job is, also while it hangs.

It reads what the helper threads of the ranks write into the job's store every few seconds (see `positions`), and asks
them for nothing.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .positions import POSITIONS
from .timing import TIMING

__all__ = ["add_status_command"]

NUM_LATE = 3  # signs of life that a rank leaves out until the table calls it silent
HEADINGS = ("rank", "replica", "pipeline rank", "step", "at", "for", "waits for", "last sign of life", "process")


def add_status_command(commands: Any) -> None:
    """Let a parser know the subcommand `status`.

    Args:
        commands: what argparse's `add_subparsers` returned.
    """
    status = commands.add_parser(
        "status",
        help="where every rank of a running job is",
        description="Print where every rank of a running job is, also while it hangs.",
    )
    status.add_argument(
        "address",
        nargs="?",
        help="HOST:PORT of torch.distributed's store; default: MASTER_ADDR and MASTER_PORT of the environment, or of "
        "the ranks on this host",
    )
    status.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> None:
    address = args.address or _address_in(dict(os.environ)) or _address_of_ranks_here()
    positions = read_positions(address)
    now = time.time()
    rows = [HEADINGS, *(_row(rank, position, now) for rank, position in enumerate(positions))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip())
    for rank in _holding_up(positions):
        _, _, _, _, at, seconds, _, life, _ = rows[rank + 1]
        print(f"held up by rank {rank}, at {at} for {seconds}, last sign of life: {life}")
    print(f"megapipe status {address}")


def read_positions(address: str) -> list[dict[str, Any] | None]:
    """The position of each rank; None for a rank that has not begun a step.

    Raises:
        ValueError: there is no store at the address, or no job has written to it.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"the address of a job's store is HOST:PORT, like MASTER_ADDR:MASTER_PORT, got {address!r}.")
    limit = datetime.timedelta(seconds=TIMING.for_status)
    try:
        store = dist.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
        size = POSITIONS.format("size")
        if not store.check([size]):
            raise ValueError(f"no rank has begun a step in the job with the store at {address} yet: ask again later.")
        keys = [POSITIONS.format(rank) for rank in range(int(store.get(size)))]
        return [json.loads(store.get(key)) if store.check([key]) else None for key in keys]
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"the store at {address} does not answer ({reason}): is the job running?") from None


def _row(rank: int, position: dict[str, Any] | None, now: float) -> tuple[str, ...]:
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
        f"{silence:.0f} s ago" + (", silent" if silence > NUM_LATE * TIMING.beat else ""),
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
