"""Ranks of a pipeline as processes of this machine, forked from this one: what it has imported and made is theirs."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from .places import error_in_words, is_the_callers

NO_FORK = (
    "this process has computed gradients on a device, with threads that no fork of it has: prove before that, or "
    "start under torchrun"
)
GRACE = 3.0
"""Seconds that other ranks have to end by themselves, once one has failed."""


class RanksError(RuntimeError):
    """Ranks that failed, or did not come to their end: the message says where each of them was."""


def on_local_ranks(num_ranks: int, function: Callable[[], Any], timeout: float) -> list[Any]:
    """Call a function on each of so many new processes, which have process groups of gloo.

    Args:
        timeout: seconds after which a rank that has not returned counts as hung.

    Returns:
        What it returns, by rank. That travels as text and numbers, so not with tensors.

    Raises:
        RanksError: a rank raised an error, or did not come to its end.
        ValueError: processes cannot be forked here.
    """
    if "fork" not in multiprocessing.get_all_start_methods():
        raise ValueError("ranks on this machine are forked processes, which it has not: start under torchrun instead.")
    import torch

    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise ValueError("this process uses CUDA, which forked ones cannot: start under torchrun instead.")
    importlib.import_module("torch.fx.experimental.symbolic_shapes")  # or the first backward of each rank does
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        try:
            for rank in range(num_ranks):  # none has threads yet: a lock that one held would stay locked in a fork
                end, other = context.Pipe()
                places = Path(folder, str(rank))
                process = context.Process(target=_run, args=(rank, num_ranks, function, other, places), daemon=True)
                process.start()
                other.close()
                processes.append(process)
                ends.append(end)
            port = ends[0].recv()
            for end in ends[1:]:
                end.send(port)
            return _gather(processes, ends, timeout, Path(folder))
        finally:
            for process in reversed(processes):  # the first one has the store, which others look for
                process.kill()
                process.join()


def _run(rank: int, num_ranks: int, function: Callable[[], Any], end: Connection, places: Path) -> None:
    """A rank, until it is ended: the first one has the store that all others need to the last."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with places.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            if rank == 0:
                store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
                end.send(store.port)
            else:
                store = dist.TCPStore("localhost", end.recv())
            dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
            end.send((function(), ""))
        except BaseException as error:
            end.send((None, NO_FORK if "autograd's threading" in str(error) else error_in_words(error)))
        sys.stdout.flush()
        parent = os.getppid()
        while os.getppid() == parent:
            time.sleep(0.1)
        os._exit(0)


def _gather(processes: Sequence[Any], ends: Sequence[Connection], timeout: float, folder: Path) -> list[Any]:
    results: list[Any] = [None] * len(ends)
    errors: dict[int, str] = {}
    left: dict[Any, int] = {end: rank for rank, end in enumerate(ends)}
    deadline = time.monotonic() + timeout
    while left and (ready := wait(list(left), max(0.0, deadline - time.monotonic()))):
        for end in ready:
            rank = left.pop(end)
            try:
                results[rank], error = ends[rank].recv()
            except EOFError:
                error = "its process ended without a word"
            if error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + GRACE)
    if not errors and not left:
        return results
    waiting = {rank: _where(processes[rank], folder / str(rank)) for rank in left.values()}
    if not errors:
        places = "; ".join(f"rank {rank} {place}" for rank, place in waiting.items())
        raise RanksError(f"it hangs: after {timeout:g} s {places}.")
    raise RanksError(first_failure(errors))


def first_failure(errors: dict[int, str]) -> str:
    """What has failed first, by rank: one that has not heard of the failure of another."""
    heard = ("PipelineError", "DistNetworkError", "DistBackendError", "RuntimeError: [")
    rank = min(errors, key=lambda rank: (errors[rank].startswith(heard), rank))
    return f"rank {rank} failed: {errors[rank]}"


def _where(process: Any, places: Path) -> str:
    """Where a rank is that does not come back: the caller's last line, and what it has called there."""
    try:
        os.kill(process.pid, signal.SIGUSR1)
    except ProcessLookupError:
        return "has ended"
    end = time.monotonic() + 2.0
    while not (text := places.read_text()).count("\n") > 1 and time.monotonic() < end:
        time.sleep(0.02)
    frames = [line.strip() for line in text.splitlines() if line.strip().startswith("File")]
    if not frames:
        return "does not say where it is"
    parts = [re.fullmatch(r'File "(.*)", line (\d+) in (.*)', frame) for frame in frames]
    own = [f"{Path(one[1]).name}:{one[2]}" for one in parts if one is not None and is_the_callers(one[1])]
    inner = frames[0].rpartition(" in ")[2]
    return f"is in {inner}" + (f", called at {own[0]}" if own else "")
