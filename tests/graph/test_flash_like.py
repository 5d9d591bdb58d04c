"""Captured stages with an operator that returns what CUDA's flash attention does: numbers and None beside tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tools.graphs import skip_without_tracer
from torch import Tensor, nn

from megapipe.graph import capture
from megapipe.weight_grad import DeferredGrads

LIBRARY = torch.library.Library("like_cuda", "DEF")
RESULTS = "Tensor logsumexp, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, SymInt max_k, Tensor rng_state"
LIBRARY.define(f"flash(Tensor q, Tensor k, Tensor v) -> (Tensor out, {RESULTS})")
LIBRARY.define(
    f"flash_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, {RESULTS}) -> (Tensor, Tensor, Tensor)"
)


def flash(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    scores = q @ k.transpose(-1, -2)
    logsumexp = scores.logsumexp(-1)
    out = (scores - logsumexp.unsqueeze(-1)).exp() @ v
    return out, logsumexp, None, None, q.shape[-2], k.shape[-2], torch.zeros(2, dtype=torch.int64, device=q.device)


def flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        return torch.autograd.grad(flash(*inputs)[0], inputs, grad)


class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> tuple[Any, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            results = torch.ops.like_cuda.flash(*inputs)
        ctx.save_for_backward(*inputs, *(value for value in results if isinstance(value, Tensor)))
        ctx.others = [None if isinstance(value, Tensor) else (value,) for value in results]
        return results

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *unused: Any) -> tuple[Tensor, ...]:
        inputs, tensors = ctx.saved_tensors[:3], iter(ctx.saved_tensors[3:])
        results = [next(tensors) if other is None else other[0] for other in ctx.others]
        return torch.ops.like_cuda.flash_backward(grad, *inputs, *results)


LIBRARY.impl("flash", flash, "CPU")
LIBRARY.impl("flash", flash, "Meta")
LIBRARY.impl("flash", Flash.apply, "AutogradCPU")
LIBRARY.impl("flash_backward", flash_backward, "CPU")
LIBRARY.impl("flash_backward", lambda grad, q, k, v, *saved: tuple(map(torch.empty_like, (q, k, v))), "Meta")


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(torch.ops.like_cuda.flash(*self.qkv(x).chunk(3, -1))[0])


@pytest.mark.parametrize("recompute", [False, True])
def test_equal_to_eager(recompute: bool) -> None:
    skip_without_tracer()
    torch.manual_seed(0)
    eager, x = Attention(), torch.randn(2, 5, 8)
    captured = capture(copy.deepcopy(eager), (x.clone().requires_grad_(),), recompute=recompute)
    gradients = []
    for model in (eager, captured):
        mine, deferred = x.clone().requires_grad_(), DeferredGrads()
        loss = model(mine).square().sum()
        with deferred:
            loss.backward()
        assert deferred.is_empty() == (model is eager)
        deferred.run()
        gradients.append([mine.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)
