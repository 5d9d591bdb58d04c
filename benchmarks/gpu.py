"""On GPUs: what F, B and W of GPT layers take, whether the host stays ahead, and what is held in memory; what a waiting
receive costs, what captured stages gain, and steps of pipelines.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --hidden-size 64 --heads 2 --seq-length 32 --folder /tmp/gpu

The second command measures nothing worth knowing: it runs the same functions where there is no GPU. All times are those
of the device, by CUDA events, unless they are the host's by name.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.multiprocessing import ProcessExitedException

from megapipe.runtime import Pipeline
from megapipe.timing import Clock, clock_of
from megapipe.weight_grad import DeferredGrads, convert

from . import gpu_pipelines, gpu_stages
from .gpt_layers import WARMUP, example, interval, make_layers
from .gpu_pipelines import make, mean_square
from .gpu_stages import full_pass, milliseconds, split_pass
from .launching import call, in_turns, launch
from .memory import memory_of
from .options import options
from .runners import Runner
from .tables import Table, median_and_spread, save_table

SCHEDULES = ["1f1b", "zb1p", "zbv"]
STEP_VERBS = ["forward_step", "backward_step", "backward_input_step", "backward_weight_step"]
MESSAGE_VERBS = ["recv_forward", "send_forward", "recv_backward", "send_backward"]

SPLIT_HEADER = "gradients | F | torch, full | megapipe, full | B | W | B + W | (B + W) / torch | off by"
SPLIT_NOTES = """Milliseconds, medians of interleaved passes, in brackets the middle half; gradients are added to those
that are there. *torch, full*: a backward through torch's own layers. *main_grad*: torch's gradients are added to it in
a hook, as Megatron's DistributedDataParallel does; products that megapipe puts off are added to it directly. *off by*:
norm of the difference of all gradients of one microbatch, B and W against torch's, over the norm of torch's."""
MEMORY_HEADER = "gradients | after F | after B | after W | peak of F, B, W | peak of F, torch's backward"
MEMORY_NOTES = """Megabytes above what was there before, parameters and gradients among that. *after F* there is a
microbatch's graph with its output, *after B* what its W needs and the input's gradient."""
HOST_HEADER = "schedule | verb | host, us | device, us | host / device"
HOST_NOTES = """Per call, medians of all calls, in brackets the middle half. *host*: with the model's own Python and
torch's launches in it, in steps of their own in which the device has nothing left to do when a verb is called:
otherwise a launch waits for room in the device's queue. The host is hidden where its time is less than the device's.
Verbs of messages compute nothing: with one rank there is none to send to, and zbv hands over locally."""
STEP_HEADER = "schedule | step, ms | bare loop, ms | step / bare loop | peak memory, MB"
STEP_NOTES = """Medians of interleaved steps, in brackets the middle half. *bare loop*: F and full backward of the same
chunks called by hand. What a step takes longer, the host has not hidden."""


def main(arguments: list[str] | None = None) -> None:
    args = parse(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks.gpu: skipped, since torch finds no CUDA device here; run it on a machine with a GPU "
            "(--device cpu with small sizes only checks that it runs)."
        )
        return
    device = torch.cuda.get_device_name() if args.device == "cuda" else args.device
    num_gpus = torch.cuda.device_count() if args.device == "cuda" else 1
    start = time.monotonic()
    failed = []
    for section, (measured, what) in SECTIONS.items():
        if time.monotonic() - start > 0.7 * 60 * args.minutes:  # any may take the rest
            print(f"benchmarks.gpu: {section} skipped, since little is left of --minutes {args.minutes:g}.")
            continue
        num_ranks = {"one": 1, "all": num_gpus, "shared": max(args.memory_ranks, num_gpus)}[what]
        fitted = args if what == "one" else gpu_pipelines.fitting(args, num_ranks)
        sizes = f"{fitted.layers} GPT layers of hidden {args.hidden_size}, {args.seq_length} tokens, {args.dtype}"
        try:
            tables = launch(num_ranks, measured, fitted, undisturbed=False)
        except ProcessExitedException:  # after its traceback
            failed.append(section)
            continue
        for name, title, header, rows, notes in tables:
            save_table(name, f"{title}, {device}: {sizes}", header, rows, notes, args.folder)
    if failed:
        sys.exit(f"benchmarks.gpu: {', '.join(failed)} failed, see above.")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """A microbatch is one sequence. `memory_ranks` share the GPUs where memory is measured. No part is begun after 0.7
    of the minutes."""
    return options(
        arguments,
        device="cuda",
        dtype="bfloat16",
        hidden_size=4096,
        heads=32,
        layers=4,
        seq_length=4096,
        microbatches=8,
        repeats=25,
        captures="eager,captured,compiled",
        memory_ranks=4,
        minutes=10.0,
    )


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    clock = clock_of(torch.device(args.device))
    kinds = {f"{args.dtype} .grad": False, "float32 main_grad": True}
    pairs = {name: Pair(args, has_main_grad) for name, has_main_grad in kinds.items()}
    split = [[name, *split_row(args, clock, pair)] for name, pair in pairs.items()]
    memory = [[name, *memory_row(args, pair)] for name, pair in pairs.items()]
    pairs.clear()
    runners = [make(args, f"megapipe {name}") for name in SCHEDULES]
    host, steps = host_rows(args, clock, runners), step_rows(args, clock, runners)
    return [
        ("gpu-split", "Splitting the backward", SPLIT_HEADER, split, SPLIT_NOTES),
        ("gpu-memory", "Memory", MEMORY_HEADER, memory, MEMORY_NOTES),
        ("gpu-host", f"Verbs, pp=1, m={args.microbatches}", HOST_HEADER, host, HOST_NOTES),
        ("gpu-steps", f"Steps, pp=1, m={args.microbatches}", STEP_HEADER, steps, STEP_NOTES),
    ]


# Layers


class Pair:
    """The same layers twice: torch's own, and with megapipe's linear ones."""

    def __init__(self, args: argparse.Namespace, has_main_grad: bool) -> None:
        self.plain = make_layers(args, args.layers)
        self.ours = convert(make_layers(args, args.layers))
        self.examples = example(args), example(args)
        if has_main_grad:
            for parameter in [*self.plain.parameters(), *self.ours.parameters()]:
                parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
                parameter.grad_added_to_main_grad = False
                parameter.register_post_accumulate_grad_hook(_add_to_main_grad)

    def difference(self) -> float:
        """Between the gradients that either has so far, over the norm of torch's."""
        squares = [0.0, 0.0]
        for mine, theirs in zip(self.ours.parameters(), self.plain.parameters()):
            a, b = (getattr(p, "main_grad", p.grad).double() for p in (mine, theirs))
            squares[0] += float((a - b).square().sum())
            squares[1] += float(b.square().sum())
        return float((squares[0] / squares[1]) ** 0.5)


def _add_to_main_grad(parameter: Any) -> None:
    """As Megatron's DistributedDataParallel does; zeros stand in where the gradient has been added already."""
    if parameter.grad is not None and not parameter.grad_added_to_main_grad:
        parameter.main_grad.add_(parameter.grad)
    parameter.grad = None


# F, B and W


def split_row(args: argparse.Namespace, clock: Clock, pair: Pair) -> list[str]:
    full_pass(clock, pair.plain, *pair.examples)
    split_pass(clock, pair.ours, *pair.examples)
    difference = pair.difference()
    ways = [(full_pass, pair.plain), (full_pass, pair.ours), (split_pass, pair.ours)]
    passes = [functools.partial(one, clock, layers, *pair.examples) for one, layers in ways]
    found = in_turns(passes, args.repeats, WARMUP, call)
    (whole,), (own,), (forward, inputs, weights) = (milliseconds(clock, mine) for mine in found)
    both = [b + w for b, w in zip(inputs, weights)]
    cells = [median_and_spread(column, "{:.2f}") for column in (forward, whole, own, inputs, weights, both)]
    return [*cells, median_and_spread([one / full for one, full in zip(both, whole)]), f"{difference:.0e}"]


# Memory


def memory_row(args: argparse.Namespace, pair: Pair) -> list[str]:
    """`pair` has gradients already."""
    kept: list[Any] = []

    def run(actions: str, layers: nn.Sequential) -> None:
        x, grad = pair.examples
        output, deferred = layers(x.detach().requires_grad_()), DeferredGrads()
        kept.append((output, deferred))
        if "B" in actions:
            with deferred:
                output.backward(grad)
        if "W" in actions:
            deferred.run()

    found = []
    for actions, layers in [("F", pair.ours), ("FB", pair.ours), ("FBW", pair.ours), ("FBW", pair.plain)]:
        found.append(memory_of(args.device, functools.partial(run, actions, layers)))
        kept.clear()
    numbers = [one.held for one in found[:3]] + [one.peak for one in found[2:]]
    return [f"{number / 2**20:,.1f}" for number in numbers]


# The host


@contextmanager
def around_verbs(around: Callable[[str, Callable[[], None]], None]) -> Iterator[None]:
    """Meanwhile `around(verb, function)` is called in place of each verb, and calls it."""

    def wrap(verb: str, function: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: around(verb, functools.partial(function, *args))

    wrapped = {verb: wrap(verb, getattr(Pipeline, verb)) for verb in STEP_VERBS + MESSAGE_VERBS}
    with mock.patch.multiple(Pipeline, **wrapped):
        yield


def on_host(device: str, times: dict[str, list[float]], verb: str, function: Callable[[], None]) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    times[verb].append(1e6 * (time.perf_counter() - begin))


def on_device(clock: Clock, marks: dict[str, list[Any]], verb: str, function: Callable[[], None]) -> None:
    marks[verb].append(interval(clock, function))


def host_rows(args: argparse.Namespace, clock: Clock, runners: list[Runner]) -> list[list[str]]:
    hosts: list[dict[str, list[float]]] = [defaultdict(list) for _ in runners]
    devices: list[dict[str, list[Any]]] = [defaultdict(list) for _ in runners]
    for number in range(WARMUP + args.repeats):
        if number == WARMUP:
            for times in hosts + devices:
                times.clear()
        for runner, host, device in zip(runners, hosts, devices):
            with around_verbs(functools.partial(on_host, args.device, host)):
                runner.step()
            with around_verbs(functools.partial(on_device, clock, device)):
                runner.step()
    rows = []
    for runner, host, device in zip(runners, hosts, devices):
        for verb in host:
            cells = ["-", "-"]
            if verb in STEP_VERBS:
                times = [1000 * clock.elapsed(*marks) for marks in device[verb]]
                cells = [median_and_spread(times, "{:.0f}"), f"{median(host[verb]) / median(times):.2f}"]
            rows.append([runner.name, verb, median_and_spread(host[verb], "{:.0f}"), *cells])
    return rows


def step_rows(args: argparse.Namespace, clock: Clock, runners: list[Runner]) -> list[list[str]]:
    bare_loops = [functools.partial(bare_loop, runner, args.microbatches) for runner in runners]
    functions = [*(runner.step for runner in runners), *bare_loops]
    marks = in_turns(functions, args.repeats, 0, functools.partial(interval, clock))
    times = [[clock.elapsed(*one) for one in mine] for mine in marks]
    rows = []
    for runner, steps, bare in zip(runners, times, times[len(runners) :]):
        ratios = [step / loop for step, loop in zip(steps, bare)]
        peak = memory_of(args.device, runner.step).peak
        cells = [median_and_spread(steps, "{:.1f}"), median_and_spread(bare, "{:.1f}"), median_and_spread(ratios)]
        rows.append([runner.name, *cells, f"{peak / 2**20:,.1f}"])
    return rows


def bare_loop(runner: Runner, num_microbatches: int) -> None:
    for _ in range(num_microbatches):
        output = runner.modules[0]()
        for module in runner.modules[1:]:
            output = module(output)
        (mean_square(output) / num_microbatches).backward()


SECTIONS: dict[str, tuple[Callable[..., list[Table]], str]] = {
    "layers and verbs": (measure, "one"),
    "stages": (gpu_stages.measure, "one"),
    "pipelines": (gpu_pipelines.measure_steps, "all"),
    "ways": (gpu_pipelines.measure_ways, "all"),
    "memory": (gpu_pipelines.measure_memory, "shared"),
}
"""How many ranks each takes: one, one for each GPU, or several on each."""


if __name__ == "__main__":
    main()
