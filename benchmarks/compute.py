"""Schedules on real compute: the example's GPT on two ranks, a core each. Tokens per second, and memory.

    python -m benchmarks.compute

Every runner trains the same model on the same tokens, forward and backward without an optimizer, and its gradients are
compared with those of the unpartitioned model before it is timed.
"""

from __future__ import annotations

import argparse
import functools
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe import StageInfo, weight_grad

from .gpt_layers import VOCABULARY, GPTStage, config_of
from .launching import gather, in_turns
from .memory import memory_of
from .options import run
from .runners import ByHand, Runner, is_there, make_runner
from .tables import Table, median_and_spread

CONVERTED = " (deferring layers)"
"""The end of a runner's name: with megapipe's layers, although no W is deferred."""
RUNNERS = [
    "stages alone",
    "bare-loop 1f1b",
    "megapipe gpipe",
    "megapipe 1f1b",
    f"megapipe 1f1b{CONVERTED}",
    "megapipe interleaved_1f1b",
    "megapipe zb1p",
    "megapipe zb2p",
    "megapipe zbv",
    "megapipe dualpipev",
    "torch GPipe",
    "torch 1F1B",
    "torch Interleaved1F1B",
    "torch InterleavedZeroBubble",
    "torch ZBVZeroBubble",
    "megatron-core 1f1b",
    "megatron-core interleaved",
]
HEADER = "library and schedule | step, ms | tokens/s | step / stages alone | peak memory, MB | gradients off by"
NOTES = """Medians of interleaved steps, in brackets the middle half. *stages alone*: each rank runs forward and
backward of its stage, with torch's own layers, and waits for no other. *peak memory*: the most that torch's allocator
had given out on each rank, from before the runner was built until after two steps, less the parameters and their
gradients; for torch with the 1 MB that its first stage is given as input. *gradients off by*: norm of the difference
from the unpartitioned model's over the norm of these, of the worst parameter. The stages have torch's own layers, but
for *deferring layers* and where megapipe splits the backward. All microbatches are the same."""


class Timed(NamedTuple):
    """A runner ready to be timed, and what is known of it."""

    name: str
    runner: Runner
    peak: int  # bytes on this rank
    error: float | None  # None for what is no training


# A microbatch is one sequence.
DEFAULTS: dict[str, Any] = {"pp": 2, "microbatches": 8, "layers": 8, "hidden_size": 256, "heads": 4, "seq_length": 128}
DEFAULTS |= {"rounds": 10, "runners": ",".join(RUNNERS)}


# Stages


class Part(nn.Module):
    """One stage of the GPT for any of the runners. It has its one microbatch with it; on the last stage it returns the
    loss."""

    def __init__(self, args: argparse.Namespace, index: int, num_stages: int, how: str, config: Any) -> None:
        super().__init__()
        self.config = config
        self.gpt = GPTStage(config_of(args), StageInfo(index, num_stages))
        if how != "deferring":
            with_torch_layers(self.gpt)
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(VOCABULARY, (args.seq_length + 1, 1), generator=generator)
        self._tokens, self._targets = tokens[:-1], tokens[1:]

    def set_input_tensor(self, inputs: Any) -> None:
        self.gpt.set_input_tensor(inputs if isinstance(inputs, list) else [inputs])

    def forward(self, x: Tensor | None = None) -> Tensor:
        """torch hands the input over as an argument."""
        if x is not None:
            self.gpt.set_input_tensor([x])
        output: Tensor = self.gpt(self._tokens)
        if self.gpt.head is None:
            return output
        return F.cross_entropy(output.flatten(0, 1), self._targets.flatten())


def with_torch_layers(module: nn.Module) -> None:
    """The opposite of `convert`."""
    torch_layers = {weight_grad.Linear: nn.Linear, weight_grad.Embedding: nn.Embedding}
    for layer in module.modules():
        layer.__class__ = torch_layers.get(type(layer), type(layer))


def own_loss(output: Tensor, target: Any = None) -> Tensor:
    """The last stage's output is the loss."""
    return output


class OwnWork(ByHand):
    """What this rank has to compute, and nothing else. Its gradients are those of no model."""

    def step(self) -> None:
        for _ in range(self._m):
            x = torch.zeros(self._shape, requires_grad=True)
            self.modules[0].set_input_tensor(x)
            y = self.modules[0]()
            y.backward(torch.ones_like(y))


# Measuring


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    reference, names = reference_gradients(args), list(filter(is_there, args.runners.split(",")))
    everybody = [prepare(name, args, reference) for name in names]
    durations = in_turns([one.runner.step for one in everybody], args.rounds, 0)
    facts = gather([(one.peak, one.error) for one in everybody])
    base = durations[names.index("stages alone")] if "stages alone" in names else None
    rows = [row(name, args, seconds, base, of_ranks) for name, seconds, of_ranks in zip(names, durations, zip(*facts))]
    sizes = f"{args.layers} layers of hidden {args.hidden_size}, {args.seq_length} tokens per microbatch"
    title = f"The example's GPT, pp={args.pp}, m={args.microbatches}: {sizes}, float32, one thread per rank"
    return [(f"compute-pp{args.pp}", title, HEADER, rows, NOTES)]


def reference_gradients(args: argparse.Namespace) -> dict[str, Tensor]:
    whole = Part(args, 0, 1, "whole", None)
    whole().backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}


def prepare(name: str, args: argparse.Namespace, reference: dict[str, Tensor]) -> Timed:
    """Build a runner, run two steps, and look at what they did."""
    built: list[Runner] = []

    def build_and_run() -> None:
        built.append(build(name, args))
        for _ in range(2):
            built[0].step()

    peak = memory_of("cpu", build_and_run).peak
    (runner,) = built
    parameters = {of: p for module in runner.modules for of, p in module.named_parameters()}
    peak -= sum(p.nbytes + p.grad.nbytes for p in parameters.values())
    if name == "stages alone":
        return Timed(name, runner, peak, None)
    count = 2 if runner.averages else 2 * args.microbatches
    errors = [(p.grad / count - reference[of]).norm() / reference[of].norm() for of, p in parameters.items()]
    return Timed(name, runner, peak, float(torch.stack(errors).nan_to_num(torch.inf).max()))


def build(name: str, args: argparse.Namespace) -> Runner:
    make_stage: Any = functools.partial(Part, args)
    options: dict[str, Any] = {"loss": own_loss, "width": args.hidden_size}
    if name == "stages alone":
        return OwnWork("1f1b", args.microbatches, make_stage, args.seq_length, **options)
    plain_name = name.removesuffix(CONVERTED)
    if plain_name != name:
        make_stage = lambda index, num_stages, how, config: Part(args, index, num_stages, "deferring", config)  # noqa: E731
    return make_runner(plain_name, args.microbatches, make_stage, args.seq_length, **options)


def row(
    name: str,
    args: argparse.Namespace,
    seconds: list[float],
    base: list[float] | None,
    facts: tuple[tuple[int, float | None], ...],
) -> list[str]:
    """`seconds`: of each step; `base`: of those of "stages alone"; `facts`: per rank peak in bytes and error."""
    tokens = args.microbatches * args.seq_length
    errors = [error for _, error in facts if error is not None]
    return [
        name,
        median_and_spread([1000 * one for one in seconds], "{:.0f}"),
        f"{tokens / median(seconds):,.0f}",
        "-" if base is None else f"{median(seconds) / median(base):.3f}",
        ", ".join(f"{peak / 2**20:.1f}" for peak, _ in facts),
        f"{max(errors):.0e}" if errors else "-",
    ]


if __name__ == "__main__":
    # In a real-time class gloo's threads would wait for a whole time slice of the ranks, which leave no core idle.
    run(measure, undisturbed=False, **DEFAULTS)
