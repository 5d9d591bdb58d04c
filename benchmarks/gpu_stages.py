"""On one GPU: what a receive that waits costs the layers beside it, and what captured and compiled stages gain."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.graph import capture
from megapipe.timing import Clock, clock_of
from megapipe.weight_grad import DeferredGrads, convert

from .gpt_layers import WARMUP, example, interval, make_layers
from .launching import call, in_turns
from .tables import Table, median_and_spread

CTAS = [0, 1, 4, 16, 32]
WAITING_HEADER = "thread blocks that wait | F | against none | B | against none | W | against none"
WAITING_NOTES = """Milliseconds, medians of interleaved passes, in brackets the middle half; the ratios are taken pass
by pass. Beside the layers a kernel waits in a stream of its own, as a receive of NCCL does: with as many blocks of 640
threads, one of which polls, and with so much shared memory that no matrix product fits beside it on its multiprocessor.
A receive over megapipe's channels has up to 4 such blocks, and waits only while nothing else can run."""
CAPTURED_HEADER = "layers | F | full backward | B | W | F + B + W | against eager | capture, s"
CAPTURED_NOTES = """Milliseconds, medians of interleaved passes, in brackets the middle half; the ratio is taken pass by
pass. *eager*: megapipe's linear layers. *capture*: with compiling, where that is done, and the first passes."""

SPIN = """
extern "C" __global__ void __launch_bounds__(640, 1) wait_for(volatile int* flag) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    if (threadIdx.x == 0) do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*flag == 0 && now - begin < 5000000000ull);  // never longer than 5 s
    __syncthreads();
}
"""
SHARED_MEMORY = 128 * 1024  # bytes of a block: more than half of what a multiprocessor has


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    clock = clock_of(torch.device(args.device))
    waiting, captured = waiting_rows(args, clock), captured_rows(args, clock)
    return [
        ("gpu-waiting", "Receives that wait beside layers", WAITING_HEADER, waiting, WAITING_NOTES),
        ("gpu-captured", "Captured and compiled layers", CAPTURED_HEADER, captured, CAPTURED_NOTES),
    ]


class Spinning:
    """Kernels that wait until the host lets them end. On CPU nothing waits: there is no such thing to measure."""

    def __init__(self, device: str) -> None:
        self._is_gpu = device == "cuda"
        if self._is_gpu:
            self._kernel = torch.cuda._compile_kernel(SPIN, "wait_for")
            self._shared_memory = min(SHARED_MEMORY, torch.cuda.get_device_properties().shared_memory_per_block_optin)
            self._kernel.set_shared_memory_config(self._shared_memory)
            self._flag = torch.zeros(1, dtype=torch.int32, device=device)
            self._stream = torch.cuda.Stream(priority=-1)

    @contextmanager
    def beside(self, ctas: int) -> Iterator[None]:
        if not self._is_gpu or ctas == 0:
            yield
            return
        self._flag.zero_()
        torch.cuda.synchronize()
        self._kernel((ctas, 1, 1), (640, 1, 1), [self._flag], self._shared_memory, self._stream)
        time.sleep(1e-3)  # it is on its multiprocessors before the layers are
        try:
            yield
            torch.cuda.current_stream().synchronize()
        finally:
            self._flag.fill_(1)  # in the stream of the layers, which runs beside
            self._stream.synchronize()


def waiting_rows(args: argparse.Namespace, clock: Clock) -> list[list[str]]:
    layers = convert(make_layers(args, args.layers))
    x, grad = example(args), example(args)
    spinning = Spinning(args.device)
    for _ in range(WARMUP):  # all is loaded and allocated before anything waits on the device
        split_pass(clock, layers, x, grad)

    def beside(ctas: int) -> list[tuple[Any, Any]]:
        with spinning.beside(ctas):
            return split_pass(clock, layers, x, grad)

    passes = in_turns([partial(beside, ctas) for ctas in CTAS], args.repeats, 0, call)
    alone = milliseconds(clock, passes[0])
    rows = []
    for ctas, mine in zip(CTAS, passes):
        cells = []
        for times, base in zip(milliseconds(clock, mine), alone):
            cells += [median_and_spread(times, "{:.2f}"), median_and_spread([t / b for t, b in zip(times, base)])]
        rows.append([str(ctas), *cells])
    return rows


def captured_rows(args: argparse.Namespace, clock: Clock) -> list[list[str]]:
    x, grad = example(args), example(args)
    made: dict[str, tuple[nn.Module, float]] = {}
    for way in args.captures.split(","):
        start = time.perf_counter()
        layers = in_way(args, way, x)
        for _ in range(WARMUP):
            full_pass(clock, layers, x, grad)
            split_pass(clock, layers, x, grad)
        made[way] = layers, time.perf_counter() - start
    functions = [partial(one, clock, layers, x, grad) for one in (full_pass, split_pass) for layers, _ in made.values()]
    passes = in_turns(functions, args.repeats, 0, call)
    wholes, splits = (dict(zip(made, half)) for half in (passes[: len(made)], passes[len(made) :]))
    sums = {way: [sum(times) for times in zip(*milliseconds(clock, passes))] for way, passes in splits.items()}
    rows = []
    for way, (_, seconds) in made.items():
        forward, inputs, weights = (median_and_spread(one, "{:.2f}") for one in milliseconds(clock, splits[way]))
        whole = median_and_spread(milliseconds(clock, wholes[way])[0], "{:.2f}")
        ratio = median_and_spread([mine / eager for mine, eager in zip(sums[way], sums["eager"])])
        both = median_and_spread(sums[way], "{:.2f}")
        rows.append([way, forward, whole, inputs, weights, both, ratio, "" if way == "eager" else f"{seconds:.1f}"])
    return rows


def in_way(args: argparse.Namespace, way: str, x: Tensor) -> nn.Module:
    layers = make_layers(args, args.layers)
    if way == "eager":
        return convert(layers)
    return capture(layers, (x.detach().requires_grad_(),), compile="inductor" if way == "compiled" else None)


def split_pass(clock: Clock, layers: nn.Module, x: Tensor, grad: Tensor) -> list[tuple[Any, Any]]:
    """The intervals of F, B and W."""
    outputs: list[Tensor] = []
    deferred = DeferredGrads()

    def backward() -> None:
        with deferred:
            outputs.pop().backward(grad)

    forward = interval(clock, lambda: outputs.append(layers(x.detach().requires_grad_())))
    return [forward, interval(clock, backward), interval(clock, deferred.run)]


def full_pass(clock: Clock, layers: nn.Module, x: Tensor, grad: Tensor) -> list[tuple[Any, Any]]:
    """The interval of a full backward."""
    output = layers(x.detach().requires_grad_())
    return [interval(clock, lambda: output.backward(grad))]


def milliseconds(clock: Clock, passes: list[list[tuple[Any, Any]]]) -> list[list[float]]:
    """For each interval of a pass, its times in all passes."""
    return [[clock.elapsed(*one) for one in column] for column in zip(*passes)]
