"""Worker processes shared by all tests of one pytest process, and lent to one test at a time: a test runs a function
on some ranks, and each run has process groups of its own. They are forks of a process that has imported what takes
seconds."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import re
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

MAX_RANKS = 4
PATIENCE = 240  # seconds until a test counts as hung: many times what the slowest takes, as machines may be busy
MOST_THREADS = 150  # of a rank: pipelines that have failed are not freed
ENDS_WITHIN = 20  # seconds: threads of gloo end a moment after their process groups
# torch.optim and torch.manual_seed import torch's compiler.
IMPORTED_ONCE = ["pytest", "torch", "torch._dynamo", "torch.distributed.checkpoint"]
IMPORTED_WHERE_TESTED = {
    "transformers": "transformers.modeling_utils",
    "test_megatron": "megatron.core",
    "test_installed": "megatron.core",
    "test_torch_pipelining": "torch.distributed.pipelining",
}
"""By what tells that some of the tests at hand use it: a package, or the file of the tests."""


class RankError(AssertionError):
    """What went wrong on the ranks, for the test's report."""


class RankPool:
    """`size`: how many ranks a test may have at most."""

    def __init__(self, size: int = MAX_RANKS) -> None:
        from torch.distributed import TCPStore  # here: the process that only hands out tests needs no torch

        self._size = size
        self._workers: list[tuple[multiprocessing.Process, Connection, Connection]] = []
        self._num_jobs = 0
        self._store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, errors: bool = False) -> list[Any]:
        """Call `function(rank, *args)` on every rank and return the results by rank.

        A function that raises fails the test, unless `errors` is set: then the exception is its result. A rank whose
        process dies gives None then.
        """
        if not self._workers:
            self._start()
        self._num_jobs += 1
        lent = self._workers[:num_ranks]
        for rank, (_, jobs, _) in enumerate(lent):
            jobs.send((self._num_jobs, rank, num_ranks, function, args))
        results: list[Any] = [None] * num_ranks
        texts: dict[int, str] = {}
        open_jobs = {jobs: rank for rank, (_, jobs, _) in enumerate(lent)}
        some_spent = False
        end = time.monotonic() + PATIENCE
        while open_jobs:
            ready = wait(list(open_jobs), max(0.0, end - time.monotonic()))
            if not ready:
                where = "\n".join(f"rank {rank}: {self._where(rank)}" for rank in open_jobs.values())
                self.stop()
                raise RankError(f"{function.__name__} took longer than {PATIENCE} s.\n{where}\n{_joined(texts)}")
            for connection in ready:
                rank = open_jobs.pop(connection)
                try:
                    results[rank], text, is_spent = connection.recv()
                    some_spent |= is_spent
                except EOFError:
                    text = "the process died"
                if text:
                    texts[rank] = text
        if any(not process.is_alive() for process, _, _ in lent) or "the process died" in texts.values():
            self.stop()
        elif some_spent or any(len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS for process, _, _ in lent):
            self.stop()  # others take their places
        if texts and not errors:
            raise RankError(_joined(texts))
        return results

    def stop(self) -> None:
        for process, _, _ in self._workers:
            process.kill()
        for process, _, _ in self._workers:
            process.join()
        self._workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        tested = [module for package, module in IMPORTED_WHERE_TESTED.items() if package in sys.modules]
        own = [name for name in sys.modules if name.partition(".")[0] in ("megapipe", "cases", "tools")]
        context.set_forkserver_preload(IMPORTED_ONCE + tested + own)  # what is not installed is passed over
        path = os.pathsep.join(sys.path)  # the process that they are forks of looks nowhere else
        for _ in range(self._size):
            jobs, jobs_end = context.Pipe()
            control, control_end = context.Pipe()
            process = context.Process(target=_work, args=(jobs_end, control_end, self._store.port), daemon=True)
            with mock.patch.dict(os.environ, PYTHONPATH=path):
                process.start()
            jobs_end.close()
            control_end.close()
            self._workers.append((process, jobs, control))

    def _where(self, rank: int) -> str:
        """What a rank that does not come back is doing."""
        control = self._workers[rank][2]
        try:
            control.send("where")
            return str(control.recv()) if control.poll(5) else "does not answer"
        except (EOFError, OSError):
            return "the process died"


def on_ranks(num_ranks: int | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run a test on several ranks:

        @on_ranks(2)
        def test_something(rank: int, schedule: str) -> None: ...

    Its first parameter is the rank; the others are pytest's, fixtures and parameters alike. Without a number there is a
    parameter `num_ranks` among them.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(ranks: RankPool, **arguments: Any) -> None:
            ranks.run(num_ranks or arguments["num_ranks"], _Body(body.__module__, body.__name__), arguments)

        own = inspect.signature(body)
        parameters = [inspect.Parameter("ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD), *own.parameters.values()]
        test.__signature__ = own.replace(parameters=[parameters[0], *parameters[2:]])  # type: ignore[attr-defined]
        return test

    return decorate


def start_again(backend: str = "gloo") -> None:
    """New process groups, as after a restart of all processes: a failure ends the old ones. Every rank calls it."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    import megapipe

    EXCUSES.append("a failure")
    store, rank, num_ranks = _get_default_store(), dist.get_rank(), dist.get_world_size()
    megapipe.parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    number = store.add(f"starts of {rank}", 1)
    _meet(dist.PrefixStore(f"start {number}", store), rank, num_ranks, backend)


def _meet(store: Any, rank: int, num_ranks: int, backend: str = "gloo") -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks)
    dist.all_reduce(torch.zeros(1))  # a rank that ended its job now would close connections that others still make


@dataclass(frozen=True)
class _Body:
    """The function inside a test, found on the ranks by its name: what bears that name in the module is the test."""

    module: str
    qualified_name: str

    @property
    def __name__(self) -> str:
        return self.qualified_name

    def __call__(self, rank: int, arguments: dict[str, Any]) -> None:
        inspect.unwrap(getattr(importlib.import_module(self.module), self.qualified_name))(rank, **arguments)


def _joined(texts: dict[int, str]) -> str:
    return "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(texts.items()))


def _work(jobs: Connection, control: Connection, port: int) -> None:
    faulthandler.enable()
    import torch
    import torch.distributed as dist

    import megapipe

    torch.set_num_threads(1)
    timing = megapipe.failures.TIMING
    timing.for_others, timing.look, timing.tick = 1.0, 0.05, 0.05  # on one machine news travels fast
    timing.for_mistakes = 60.0  # but a machine may be busy
    server = dist.TCPStore("localhost", port)
    threading.Thread(target=_answer, args=(control, threading.main_thread().ident), daemon=True).start()
    gc.unfreeze()  # what pytest's process has frozen, where this is a fork of it: mutations.py
    CACHES.extend(caches())
    gc.freeze()  # what is imported: else each collection looks at all of it
    gc.set_threshold(10_000, 20, 20)
    before = held()
    while True:
        try:
            number, rank, num_ranks, function, args = jobs.recv()
        except EOFError:
            os._exit(0)
        result: Any = None
        _meet(dist.PrefixStore(f"job {number}", server), rank, num_ranks)
        text = ""
        try:
            result = function(rank, *args)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            result = error
        EXCUSES.extend(excuses_of_torch())
        if text or any(getattr(one, "failure", None) for one in megapipe.failures.board._current or ()):
            EXCUSES.append("a failure")
        # Torch may end a process a minute after one of its messages over NCCL has failed.
        is_spent = torch.cuda.is_initialized() and "a failure" in EXCUSES
        _end_job()
        if EXCUSES:
            before.update(held() - before - MAY_STAY)
            EXCUSES.clear()
        elif left := left_behind(before):
            text = f"{function.__name__} has left behind on rank {rank}: {left}."
        try:
            jobs.send((result, text, is_spent))
        except Exception:  # an exception that cannot be pickled
            jobs.send((RuntimeError(text), text, is_spent))


def _end_job() -> None:
    """A variable of the caller's would hold what ends here, as the last session."""
    import torch.distributed as dist

    import megapipe

    megapipe.parallel_state.destroy_model_parallel()
    if (megatron := sys.modules.get("megatron.core.parallel_state")) is not None:
        EXCUSES.extend(["Megatron"] * megatron.model_parallel_is_initialized())
        megatron.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_shardings()
    for session in list(megapipe.runtime.session._sessions.values()):
        session.close()  # the threads of its connections would slow down the next job
    megapipe.failures.board._current = None  # it keeps the process group that has ended until there is another


# What a job leaves behind


def of_groups(number: int) -> Counter[str]:
    """What so many process groups of gloo hold."""
    names = {"thread gloo_tcp_loop": 1, "thread pt_gloo_runloop": 2, "open file pipe": 2, "open file anon_inode": 1}
    return Counter({name: number * each for name, each in {**names, "open file socket": 8}.items()})


EXCUSES: list[str] = []
"""Why what this job leaves does not count: a pipeline that has failed is not freed, nor is what Megatron holds."""
MAY_STAY = of_groups(6) + Counter(
    {
        "thread megapipe-watchdog": 1,  # looks after all pipelines
        "thread jemalloc_bg_thd": 8,  # of pyarrow, where transformers finds datasets and peft
        "thread megapipe-store-alarm": 1,  # of the last job, which ends at the watchdog's next look
        "thread tqdm_monitor": 4,
        "thread Thread (_read_thread)": 1,  # of the processes that compile
        "thread pt_autograd_": 8,  # backwards on a device; torch 2.11 has one for each kind of device
        "thread Thread (_run)": 4,  # streams of the fake device: to compute, and to copy
    }
)
"""What a process makes once, and keeps, and the process groups of what it did last."""
CACHES: list[Any] = []
FIRST_MESH = of_groups(2)
"""Torch keeps process groups of the first mesh that DTensors were on, out of reach of Python."""


def excuses_of_torch() -> list[str]:
    import torch

    found = []
    if torch.cuda.is_available():
        found.append("CUDA, whose driver and NCCL keep threads and files")
    if torch.__version__.startswith(("2.10.", "2.11.")):
        found.append("meshes, to which torch loses references: https://github.com/pytorch/pytorch/issues/181761")
    return found


def held() -> Counter[str]:
    """The names of the threads, process groups and open files of this process."""
    from torch.distributed.distributed_c10d import _world

    found = Counter(f"process group {name}" for name in _world.pg_names.values())
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            name = names.get(int(task.name)) or (task / "comm").read_text().strip()
            if name != "python":  # threads of torch's without a name: its profiler's, and of what compiles
                found["thread " + re.sub(r"-?\d+", "", name)] += 1
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list
            found[f"open file {os.readlink(f'/proc/self/fd/{number}').partition(':')[0]}"] += 1
    return found


def left_behind(before: Counter[str]) -> str:
    """What there is more of than before the first job, once what ends by itself has ended."""
    end = time.monotonic() + ENDS_WITHIN
    for forget in (lambda: None, gc.collect, _forget_meshes):
        forget()
        if not held() - before - MAY_STAY:
            return ""
    while (left := held() - before - MAY_STAY) and time.monotonic() < end:
        time.sleep(0.01)
    before.update(left)
    return ", ".join(f"{number} x {name}" for name, number in left.items())


def _forget_shardings() -> None:
    """DTensors take a mesh for an equal one, whose process groups are gone."""
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        if hasattr(debug, "_clear_sharding_prop_cache"):
            debug._clear_sharding_prop_cache()


def _forget_meshes() -> None:
    """Torch keeps meshes with what else it has worked out for DTensors."""
    redistribute = sys.modules.get("torch.distributed.tensor._redistribute")
    if hasattr(redistribute, "clear_redistribute_planner_cache"):
        redistribute.clear_redistribute_planner_cache()
    for cache in caches():
        if cache.cache_info().currsize and FIRST_MESH:
            MAY_STAY.update(FIRST_MESH)
            FIRST_MESH.clear()
        cache.cache_clear()
    gc.collect()


def caches() -> list[Any]:
    """Those of torch.distributed: the ones found before what was there was frozen, and later ones."""
    found = [one for one in gc.get_objects() if type(one) is functools._lru_cache_wrapper]
    return CACHES + [one for one in found if str(one.__module__).startswith("torch.distributed.")]


def _answer(control: Connection, main_thread: int) -> None:
    from megapipe.runtime.session import _sessions

    while True:
        try:
            control.recv()
        except EOFError:
            return
        positions = [str(session.watchdog.progress) for session in _sessions.values()]
        stack = "".join(traceback.format_stack(sys._current_frames()[main_thread]))
        control.send(f"{positions or 'in no step'}\n{stack}")
