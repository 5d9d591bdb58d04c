"""What a microbatch asks of a GPU.

    python -m benchmarks.device_calls --pp 4

There is no GPU. Calls are counted on the device of the tests (tests/fakes), whose operators are queued for threads, and
which imitates NCCL.
"""

from __future__ import annotations

import argparse
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import host
from .launching import gather
from .options import run
from .runners import Runner, find_tests, make_runner
from .tables import Table

ROWS = 16
SCHEDULES = ["1f1b", "interleaved_1f1b", "zb1p", "zbv"]
HEADER = "schedule | kernels | allocations | NCCL kernels | event records | stream waits | `record_stream` | host waits"
NOTES = """For each microbatch, on the rank with most messages, beside the stages' own forward and backward; the loss of
a last stage counts. An *NCCL kernel* is a message. Of *event records*, *stream waits* and `record_stream` the second
number is how often torch's ProcessGroupNCCL calls them for these messages. *host waits*: for the whole device."""
FREE = ("empty", "_unsafe_view", "lift_fresh")
"""Parts of names of operators that launch no kernel, as views do not."""
Counts = dict[str, float]
OF_NCCL = {"NCCL kernels": 1, "messages": 1, "NCCL records": 2, "NCCL waits": 1}
"""What ProcessGroupNCCL does for one message: its stream waits for the caller's, and an event tells when the kernel is
over. A work's `wait` is one more stream wait."""


class Layer(host.Layer):
    """The same stage, on the device."""

    def __init__(self, *args: Any) -> None:
        from fakes.lazy_device import to_device

        super().__init__(*args)
        for name, parameter in list(self.linear.named_parameters()):
            setattr(self.linear, name, nn.Parameter(to_device(parameter.data)))
        self._example = None if self._example is None else to_device(torch.zeros(ROWS, 1, host.WIDTH))


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    rows = [row(name, of_ranks) for name, of_ranks in zip(args.schedules, count(args))]
    return [(f"device-calls-pp{args.pp}", f"Calls of a GPU, pp={args.pp}", HEADER, rows, NOTES)]


def count(args: argparse.Namespace) -> list[tuple[Counts, ...]]:
    """Of each schedule, on each rank."""
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

        settings = {"width": host.WIDTH, "p2p_transport": "nccl"}
        for name in args.schedules:
            runner = make_runner(f"megapipe {name}", args.microbatches, Layer, ROWS, **settings)
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
    from fakes import cuda_like, lazy_device, nccl_like

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
        cuda_like.as_cuda(),
    ):
        yield


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts what is asked of the device."""
    from fakes import caching_allocator, cuda_like, lazy_device, nccl_like

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
        (nccl_like.LikeNccl, "send", lambda *args: OF_NCCL),
        (nccl_like.LikeNccl, "recv", lambda *args: OF_NCCL),
        (nccl_like.Work, "wait", lambda *args: {"NCCL waits": 1}),
    ]
    with ExitStack() as stack:
        for owner, name, count in places:
            stack.enter_context(mock.patch.object(owner, name, counting(getattr(owner, name), count)))
        yield counter


def _is_free(op: Any) -> bool:
    return op.is_view or any(part in op.name() for part in FREE)


def row(name: str, counts: Sequence[Counts]) -> list[str]:
    """`counts`: by rank."""
    own = Counter(max(counts, key=lambda of_rank: of_rank["messages"]))
    own["record_stream"] -= own["messages"]

    def number(name: str) -> str:
        return f"{own[name]:.1f}".removesuffix(".0")

    pairs = [("records", "NCCL records"), ("waits", "NCCL waits"), ("record_stream", "messages")]
    return [
        name,
        *map(number, ("kernels", "allocations", "NCCL kernels")),
        *(f"{number(mine)} + {number(of_nccl)}" for mine, of_nccl in pairs),
        number("host waits"),
    ]


if __name__ == "__main__":
    run(measure, pp=4, microbatches=64, schedules=SCHEDULES)
