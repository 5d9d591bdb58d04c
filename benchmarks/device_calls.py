"""What a microbatch asks of a GPU, and what it takes the host besides.

    python -m benchmarks.device_calls --pp 4

There is no GPU. Calls are counted on the device of the tests (tests/fakes), whose operators are queued for threads, and
which imitates NCCL. That takes the host far longer than a GPU does. So the host's time is that of the same code with
tensors on the CPU, where events, streams and messages do nothing at all.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import pstats
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megapipe.timing import CudaEvents
from megapipe.transports import choice
from megapipe.transports.nccl import NcclTransport

from . import host
from .launching import gather, launch
from .runners import Runner, find_tests, is_there, make_runner, prepare_megatron
from .tables import FOLDER, median_and_spread, save_table

ROWS = 16
RUNNERS: dict[str, dict[str, bool]] = {
    "megapipe 1f1b": {},
    "torch 1F1B": {},
    "megatron-core 1f1b": {},
    "megatron-core 1f1b, batch_p2p_sync off": {"batch_p2p_sync": False},
    "megapipe interleaved_1f1b": {},
    "torch Interleaved1F1B": {},
    "megatron-core interleaved": {"batch_p2p_comm": True, "overlap_p2p_comm": False},
    "megatron-core interleaved, overlap_p2p_comm": {},
    "megapipe zb1p": {},
    "megapipe zbv": {},
    "torch ZBVZeroBubble": {},
}
"""With settings of megatron-core's."""
HEADER = [
    "library and schedule",
    "kernels",
    "allocations",
    "NCCL kernels",
    "event records",
    "stream waits",
    "`record_stream`",
    "host waits",
    "calls",
    "host",
    "host, per action",
]
NOTES = """For each microbatch, on the rank with most messages, beside the stages' own forward and backward; the loss of
a last stage counts. An *NCCL kernel* is a message, or a batch of them. Of *event records*, *stream waits* and
`record_stream` the second number is how often torch's ProcessGroupNCCL calls them for these messages. *host waits*: for
the whole device. *calls*: of Python functions and builtins. *host*: microseconds of the main thread's CPU, where
events, streams and messages do nothing; medians of interleaved steps, in brackets the middle half. An action is an F, a
B or a W of a chunk."""
FREE = ("empty", "_unsafe_view", "lift_fresh")
"""Parts of names of operators that launch no kernel, as views do not."""
Counts = dict[str, float]


class Layer(host.Layer):
    """The same stage, on the device."""

    def __init__(self, *args: Any) -> None:
        from fakes.lazy_device import to_device

        super().__init__(*args)
        for name, parameter in list(self.linear.named_parameters()):
            setattr(self.linear, name, nn.Parameter(to_device(parameter.data)))
        self._example = None if self._example is None else to_device(torch.zeros(ROWS, 1, host.WIDTH))


def main() -> None:
    args = parse()
    names = [name for name in args.runners.split(";") if is_there(name)]
    if args.pp == 2:  # whose batches mix up the neighbours: Megatron refuses it
        names = [name for name in names if name != "megatron-core interleaved"]
    counts = launch(args.pp, count, args, names)
    times = launch(args.pp, take_times, args, names)
    title = f"Calls of a GPU, pp={args.pp}"
    rows = [row(name, *columns) for name, *columns in zip(names, counts, times)]
    save_table(f"device-calls-pp{args.pp}", title, HEADER, rows, NOTES, args.folder)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--runners", default=";".join(RUNNERS), help="with semicolons between them")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    return parser.parse_args()


def make(name: str, args: argparse.Namespace, layer: Any, num_rows: int) -> Runner:
    settings = {"width": host.WIDTH, "p2p_transport": "nccl"}
    runner = make_runner(name.partition(",")[0], args.microbatches, layer, num_rows, **settings)
    for setting, value in RUNNERS[name].items():
        setattr(runner.modules[0].config, setting, value)
    return runner


# Calls


def count(rank: int, args: argparse.Namespace, names: list[str]) -> list[list[Counts]]:
    """Of each runner, on each rank."""
    find_tests()
    from fakes import lazy_device

    counts = []
    with on_device(), counted() as counter:

        def taken(function: Callable[[], None]) -> Counter[str]:
            counter.clear()
            function()
            result = counter.copy()
            lazy_device.synchronize()
            return result

        for name in names:
            runner = make(name, args, Layer, ROWS)
            zeros = runner.modules[0].linear.weight.new_zeros(ROWS, 1, host.WIDTH)
            for _ in range(3):
                whole = taken(runner.step)
                alone = taken(functools.partial(_bare, runner, zeros, args.microbatches))
            counts.append({name: (whole[name] - alone[name]) / args.microbatches for name in whole})
        return list(zip(*gather(counts)))


def _bare(runner: Runner, zeros: Tensor, num_microbatches: int) -> None:
    for _ in range(num_microbatches):
        for module in runner.modules:
            is_first = module._example is not None
            module(zeros.detach().requires_grad_(not is_first)).backward(zeros)


@contextmanager
def on_device() -> Iterator[None]:
    from fakes import cuda_like, lazy_device, nccl_groups, nccl_like

    if is_there("megatron-core"):
        prepare_megatron()
    make_zeros, make_tensor = torch.zeros, torch.tensor

    def zeros(*args: Any, device: Any = None, **options: Any) -> Tensor:
        return make_zeros(*args, device=lazy_device.DEVICE if device == "cuda" else device, **options)

    def tensor(*args: Any, device: Any = None, **options: Any) -> Tensor:
        made = make_tensor(*args, **options)
        return made if device is None else made.to(device)

    with (
        mock.patch.object(dist, "ProcessGroupNCCL", nccl_like.LikeNccl, create=True),
        mock.patch.object(torch.cuda, "current_device", return_value=lazy_device.DEVICE),
        mock.patch.multiple(torch, zeros=zeros, tensor=tensor),
        nccl_groups.over_nccl(),
        cuda_like.as_cuda(),
    ):
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what is asked of the device."""
    from fakes import caching_allocator, cuda_like, lazy_device, nccl_groups, nccl_like

    counter: Counter[str] = Counter()

    def counting(function: Callable[..., Any], count: Callable[..., Counts]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            counter.update(count(*args))  # type: ignore[arg-type]
            return function(*args, **kwargs)

        return called

    places: list[tuple[Any, str, Callable[..., Counts]]] = [
        (lazy_device, "enqueue", lambda op, *args: {} if _is_free(op) else {"kernels": 1}),
        (lazy_device, "count_sync", lambda: {"host waits": 1}),
        (lazy_device, "synchronize", lambda: {"host waits": 1}),
        (lazy_device.LazyTensor, "record_stream", lambda *args: {"record_stream": 1}),
        (lazy_device.Stream, "record_event", lambda *args: {"records": 1}),
        (lazy_device.Passed, "wait", lambda *args: {"waits": 1}),
        (caching_allocator.CachingAllocator, "allocate", lambda *args: {"allocations": 1}),
        (cuda_like.Event, "record", lambda *args: {"records": 1}),
        (cuda_like.Event, "wait", lambda *args: {"waits": 1}),
        (nccl_like.LikeNccl, "send", lambda *args: _of_nccl(1)),
        (nccl_like.LikeNccl, "recv", lambda *args: _of_nccl(1)),
        (nccl_like.Work, "wait", lambda *args: {"NCCL waits": 1}),
        (nccl_groups.Communicator, "start", lambda communicator, messages: _of_nccl(len(messages))),
    ]
    with ExitStack() as stack:
        for owner, name, count in places:
            stack.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name), count)))
        yield counter


def _is_free(op: Any) -> bool:
    return op.is_view or any(part in op.name() for part in FREE)


def _of_nccl(num_messages: int) -> Counts:
    """What ProcessGroupNCCL does for one kernel: its stream waits for the caller's once for each message, and an event
    tells when the kernel is over. A work's `wait` is one more stream wait."""
    return {"NCCL kernels": 1, "messages": num_messages, "NCCL records": num_messages + 1, "NCCL waits": num_messages}


# Times


class Nothing:
    """An event, a communicator, or the work of a message, none of which does anything."""

    Options = Any

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def send(self, *args: Any) -> Nothing:
        return _NOTHING

    recv = send
    abort = shutdown = wait


_NOTHING = Nothing()


@contextmanager
def without_device() -> Iterator[None]:
    """megapipe's code for NCCL, on the CPU."""
    from fakes.nccl_like import Options

    def transport(members: Any) -> NcclTransport:
        events = CudaEvents(torch.device("cpu"))
        return NcclTransport(members, torch.device("cpu"), lambda: events.record().query, 4)

    Nothing.Options = Options
    with (
        mock.patch.object(choice, "GlooTransport", transport),
        mock.patch.object(dist, "ProcessGroupNCCL", Nothing, create=True),
        mock.patch.multiple(torch.cuda, Event=Nothing, current_stream=lambda device: None),
    ):
        yield


@contextmanager
def without_messages() -> Iterator[None]:
    """The same for torch.distributed's groups."""
    with mock.patch.multiple(
        dist.ProcessGroup,
        send=Nothing.send,
        recv=Nothing.send,
        _get_backend=lambda group, device: SimpleNamespace(supports_coalescing=True),
        _start_coalescing=lambda group, device: None,
        _end_coalescing=lambda group, device: _NOTHING,
    ):
        yield


def take_times(rank: int, args: argparse.Namespace, names: list[str]) -> list[list[tuple[float, list[float], int]]]:
    """Of each runner, on each rank: calls, microseconds of each step, and actions for a microbatch."""
    find_tests()
    with without_device():
        runners = [make(name, args, host.Layer, host.ROWS) for name in names]
        both = [(runner.step, functools.partial(host.bare, runner, args.microbatches)) for runner in runners]
        for step, _ in both:
            step()  # the first steps of torch's ask the other ranks
            step()
        times: list[list[list[float]]] = [[] for _ in runners]
        for _ in range(args.rounds):
            for mine, functions in zip(times, both):
                dist.barrier()
                with without_messages():
                    mine.append([_seconds(function) for function in functions])
        dist.barrier()
        with without_messages():
            calls = [_num_calls(step) - _num_calls(bare) for step, bare in both]
    per_microbatch = 1e6 / args.microbatches
    results = []
    for runner, number, mine in zip(runners, calls, times):
        alone = median(bare for _, bare in mine)
        microseconds = [per_microbatch * (step - alone) for step, _ in mine]
        results.append((number / args.microbatches, microseconds, runner.num_chunks * (3 if runner.splits else 2)))
    return list(zip(*gather(results)))


def _seconds(function: Callable[[], None]) -> float:
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def _num_calls(function: Callable[[], None]) -> int:
    profiler = cProfile.Profile()
    profiler.runcall(function)
    return int(pstats.Stats(profiler).total_calls)  # type: ignore[attr-defined]


def row(name: str, counts: list[Counts], times: list[tuple[float, list[float], int]]) -> list[str]:
    """`counts`, `times`: by rank."""
    rank = max(range(len(counts)), key=lambda rank: counts[rank]["messages"])
    own = Counter(counts[rank])
    own["record_stream"] -= own["messages"]
    num_calls, microseconds, num_actions = times[rank]

    def number(name: str) -> str:
        return f"{own[name]:.1f}".removesuffix(".0")

    pairs = [("records", "NCCL records"), ("waits", "NCCL waits"), ("record_stream", "messages")]
    return [
        name,
        *map(number, ("kernels", "allocations", "NCCL kernels")),
        *(f"{number(mine)} + {number(of_nccl)}" for mine, of_nccl in pairs),
        number("host waits"),
        f"{num_calls:.0f}",
        median_and_spread(microseconds, "{:.0f}"),
        f"{median(microseconds) / num_actions:.0f}",
    ]


if __name__ == "__main__":
    main()
