"""Stages with the example's mixture of experts, and the routings that they are tried with."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPTConfig
from moe import MoE

from megapipe.weight_grad import DeferredGrads

HIDDEN, EXPERTS = 16, 4
AS_LEARNED = [0.0] * EXPERTS
ROUTINGS = {
    "as learned": (AS_LEARNED, AS_LEARNED),
    "all to rank 0": ([9.0, 8, 0, 0], [9.0, 8, 0, 0]),
    "all to rank 1": ([0.0, 0, 9, 8], [0.0, 0, 9, 8]),
    "nothing crosses": ([9.0, 8, 0, 0], [0.0, 0, 9, 8]),
    "all cross": ([0.0, 0, 9, 8], [9.0, 8, 0, 0]),
    "an expert that all choose": ([9.0, 0, 0, 0], AS_LEARNED),
    "experts without a token": ([0.0, 9, 0, 8], [0.0, 9, 0, 8]),
}
"""The routers' biases on each of two ranks, which decide where tokens go."""


class Block(nn.Module):
    """A residual linear layer in place of attention, and a mixture of experts, with norms."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.norm1, self.dense = nn.LayerNorm(width), nn.Linear(width, width)
        self.norm2, self.moe = nn.LayerNorm(width), MoE(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.gelu(self.dense(self.norm1(x)))
        return x + self.moe(self.norm2(x))


def make_stage(group: Any = None, num_layers: int = 2, seed: int = 0, **settings: Any) -> nn.Sequential:
    """[tokens, HIDDEN] to the same. Experts differ from rank to rank, all else does too: it makes no difference."""
    options = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "moe_aux_loss_coeff": 0.01, **settings}
    config = GPTConfig(expert_model_parallel_group=group, **options)
    torch.manual_seed(10 * seed + (0 if group is None else group.rank()))
    return nn.Sequential(*(Block(config) for _ in range(num_layers)))


def steer(stage: nn.Module, bias: Sequence[float]) -> None:
    """Let tokens choose experts by their bias."""
    for block in stage:
        block.moe.router.bias.copy_(torch.tensor(bias))


def run_all(
    stage: nn.Module, biases: Sequence[Sequence[float]], num_tokens: int, split: bool, autocast: bool = False
) -> list[Tensor]:
    """A microbatch for each of the biases: outputs, gradients of inputs and of parameters, and buffers. All forwards
    come first, as in a pipeline that fills: several are under way, and in backwards the bias is another."""
    torch.manual_seed(100)
    stage.zero_grad()
    for name, buffer in stage.named_buffers():
        if name.endswith("load"):
            buffer.zero_()
    under_way, results, ws = [], [], []
    dtype = next(stage.parameters()).dtype
    for bias in biases:
        x = torch.randn(num_tokens, HIDDEN, dtype=dtype, requires_grad=True)
        steer(stage, bias)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = stage(x)
        under_way.append((x, y, torch.randn_like(y)))
        results.append(y.detach().clone())
    for x, y, grad in under_way:
        deferred = DeferredGrads()
        if split:
            with deferred:
                y.backward(grad)
        else:
            y.backward(grad)
        ws.append(deferred)
        results.append(x.grad)
    for deferred in ws:
        deferred.run()
    return [*results, *(p.grad.clone() for p in stage.parameters()), *(b.clone() for b in stage.buffers())]


def differing(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> list[int]:
    """Which are not equal to the last bit."""
    assert len(ours) == len(theirs)
    return [number for number, (one, other) in enumerate(zip(ours, theirs)) if not torch.equal(one, other)]
