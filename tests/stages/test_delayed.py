"""Modules that defer their weight gradients by themselves, as transformer-engine's do from 2.8 to 2.20."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.models import assert_same_gradients, build, run
from tools.ranks import on_ranks
from torch import Tensor, nn


class Store:
    """transformer-engine's WeightGradStore."""

    def __init__(self) -> None:
        self.context: queue.Queue[Any] = queue.Queue()

    def pop(self) -> Any:
        if self.context.empty():
            raise RuntimeError("Pop empty queue. No distributed environment detected.")
        return self.context.get()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, module: Delayed) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.module = module
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.module.wgrad_store.context.put((x, grad))
        grad_bias = grad.flatten(0, 1).sum(0) if ctx.module.fp8 and ctx.needs_input_grad[2] else None
        return grad @ weight, None, grad_bias, None


class Delayed(nn.Linear):
    """In fp8 the bias's gradient comes with B, and W has none. Otherwise W computes it, and gives it to a bias that has
    no gradient yet; the weight's is assigned."""

    def __init__(self, linear: nn.Linear, fp8: bool) -> None:
        super().__init__(linear.in_features, linear.out_features)
        self.load_state_dict(linear.state_dict())
        self.fp8 = fp8
        self.wgrad_store = Store()

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x, self.weight, self.bias, self)

    def backward_dw(self) -> None:
        x, grad = self.wgrad_store.pop()
        grad_bias = None if self.fp8 else grad.flatten(0, 1).sum(0)
        self.weight.grad = grad.flatten(0, 1).t() @ x.flatten(0, 1)
        if self.bias.grad is None:
            self.bias.grad = grad_bias.to(self.bias.dtype)


def use(block: nn.Module, how: str) -> None:
    """Let a block go through its second product in every microbatch, in every second one, or twice."""
    down, calls = block.down, SimpleNamespace(number=0)

    def forward(x: Tensor) -> Tensor:
        calls.number += 1
        if how == "every second" and calls.number % 2:
            return x[..., : down.out_features]
        once = down(x)
        return down(F.pad(once, (0, down.in_features - down.out_features))) if how == "twice" else once

    del block.down
    block.inner, block.down = down, forward


@pytest.mark.parametrize(("how", "fp8"), [("once", True), ("every second", True), ("twice", False)])
@on_ranks(2)
def test_every_gradient_is_computed_once(rank: int, how: str, fp8: bool) -> None:
    """W failed on the empty queue of a layer that its microbatch had not gone through, or that is frozen, left the
    second gradients of one that it had gone through twice to the next W, and in fp8 asked for the bias's gradient
    again, which is none there."""
    for schedule in ("1f1b", "zb1p", "zbv"):
        chunks, plain = build(schedule, 2, 4), build(schedule, 2, 4)
        for chunk, other in zip(chunks, plain):
            for number, block in chunk.layers.items():
                block.down = Delayed(block.down, fp8)
                if number == "1":
                    for one in (block, other.layers[number]):
                        one.down.requires_grad_(False)
                use(block, how)
                use(other.layers[number], how)
        for step in range(2):
            run(schedule, chunks, 5, seed=step)
            run(schedule, plain, 5, seed=step)
        for chunk, other in zip(chunks, plain):
            if how != "twice":
                assert_same_gradients([chunk], other)
            for mine, theirs in zip(chunk.parameters(), other.parameters()):
                torch.testing.assert_close(mine.grad, theirs.grad)
            assert all(block.inner.wgrad_store.context.empty() for block in chunk.layers.values())
