"""Memory of long sequences, whole and cut into slices: the example's GPT on four ranks.

python -m benchmarks.long_context
"""

from __future__ import annotations

import argparse
import itertools
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe import get_forward_backward_func, parallel_state, slices, stages_for_rank
from megapipe.plan import make_plan

from .gpt_layers import VOCABULARY, GPTStage, config_of
from .launching import gather, seconds
from .memory import Memory, memory_of
from .options import run
from .tables import Table

HEADER = "schedule | slices | loss | step, s | peak memory, MB | of 1f1b's | microbatches held | of 1f1b's"
NOTES = """One step, forward and backward, of a fresh model. *peak memory*: the most that torch's CPU allocator has
given out at once during the step, on the rank where that is most: activations, gradients, messages, temporaries.
*held*: by the plan, on the rank that holds most."""


def measure(rank: int, args: argparse.Namespace) -> list[Table]:
    parallel_state.initialize_model_parallel(args.pp)
    rows: list[list[str]] = []
    base: tuple[float, float] | None = None
    for name, num_slices in [("1f1b", 1), *(("seq1f1b", n) for n in args.slices)]:
        everybody = gather(one_step(args, name, num_slices))
        peak, took = (max(of_ranks) for of_ranks in list(zip(*everybody))[:2])
        plan = make_plan(name, args.pp, args.microbatches, num_slices=num_slices)
        held = max(plan.simulate().peak_activations)
        base = base or (peak, held)
        shares = [f"{now / before:.2f}" for now, before in zip((peak, held), base)]
        figures = [f"{everybody[-1][2]:.6f}", f"{took:.1f}", f"{peak / 1e6:.0f}", shares[0], f"{held:g}", shares[1]]
        rows.append([name, str(num_slices), *figures])
    sizes = f"{args.layers} layers of hidden {args.hidden_size}, {args.seq_length} tokens"
    title = f"Long sequences, pp={args.pp}, m={args.microbatches}: {sizes}"
    return [("long-context", title, HEADER, rows, NOTES)]


def one_step(args: argparse.Namespace, name: str, num_slices: int) -> tuple[float, float, float]:
    """Peak memory in bytes, seconds and loss of one step on this rank. The loss is the last stage's."""
    torch.manual_seed(0)
    (chunk,) = [GPTStage(config_of(args), info) for info in stages_for_rank(name)]
    chunk.config = SimpleNamespace(hidden_size=args.hidden_size, num_sequence_slices=num_slices)
    tokens = torch.randint(VOCABULARY, (args.seq_length + 1, 1), generator=torch.Generator().manual_seed(0))
    losses: list[dict[str, Tensor]] = []

    def step() -> None:
        losses.extend(
            get_forward_backward_func(name)(
                forward_step_func=forward_step,
                data_iterator=itertools.repeat(tokens),
                model=chunk,
                num_microbatches=args.microbatches,
                seq_length=args.seq_length,
                micro_batch_size=1,
            )
        )

    memory: list[Memory] = []
    took = seconds(lambda: memory.append(memory_of("cpu", step)))
    return memory[0].peak, took, sum(report["loss"].item() for report in losses) / args.microbatches


def forward_step(data_iterator: Any, model: nn.Module) -> tuple[Tensor, Any]:
    tokens = next(data_iterator)

    def loss_func(logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        labels = slices.cut(tokens[1:], 0)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (len(tokens) - 1)
        return loss, {"loss": loss.detach()}

    return model(slices.cut(tokens[:-1], 0)), loss_func


if __name__ == "__main__":
    sizes: dict[str, Any] = {"layers": 8, "hidden_size": 256, "heads": 4, "seq_length": 8192}
    run(measure, undisturbed=False, pp=4, microbatches=8, **sizes, slices=[2, 4])
