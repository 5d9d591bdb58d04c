"""Ranks as processes of this machine, as undisturbed as they can be."""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PR_SET_TIMERSLACK = 29


def launch(num_ranks: int, function: Callable[..., Any], *args: Any, undisturbed: bool = True) -> Any:
    """Run `function(rank, *args)` on each rank of a gloo process group. Returns what rank 0 returned."""
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        context = mp.spawn(_work, (num_ranks, store, results, undisturbed, function, args), num_ranks, join=False)
        while not context.join(timeout=1, grace_period=1):
            pass
    return results.get()


def _work(
    rank: int, num_ranks: int, store: str, results: SimpleQueue[Any], undisturbed: bool, function: Any, args: Any
) -> None:
    torch.set_num_threads(1)
    if undisturbed:
        be_undisturbed()
    dist.init_process_group("gloo", store=dist.FileStore(store, num_ranks), rank=rank, world_size=num_ranks)
    try:
        result = function(rank, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # others may hang: the process that waits for this one ends them
    if rank == 0:
        results.put(result)
    dist.barrier()
    os._exit(0)  # without the noise of what is torn down in some order


def be_undisturbed() -> None:
    """A real-time class where that is allowed, and timers that fire when they are due. Not in a test, which has others
    beside it."""
    if "PYTEST_CURRENT_TEST" in os.environ:
        return
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)


def gather(own: Any) -> list[Any]:
    """What every rank gives, on every rank."""
    everybody: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, own)
    return everybody


def call(function: Callable[[], Any]) -> Any:
    return function()


def seconds(function: Callable[[], Any]) -> float:
    """From the first rank's begin to the last one's end. Every rank calls it."""
    dist.barrier()
    begin = time.perf_counter()
    function()
    begins, ends = zip(*gather((begin, time.perf_counter())))
    return float(max(ends) - min(begins))


def in_turns(
    functions: Sequence[Callable[[], Any]],
    num_rounds: int,
    num_warmup: int = 1,
    measure: Callable[[Callable[[], Any]], Any] = seconds,
    block: int = 1,
) -> list[list[Any]]:
    """What `measure` finds of each of the functions in each round, which calls it `block` times: what disturbs the
    machine hits all of them alike."""
    found: list[list[Any]] = [[] for _ in functions]
    for _ in range(num_warmup + num_rounds):
        for function, mine in zip(functions, found):
            mine += [measure(function) for _ in range(block)]
    return [mine[num_warmup * block :] for mine in found]
