"""B and W of one module on one rank, against torch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tools.against import gradients
from torch import Tensor, nn

from megapipe import weight_grad
from megapipe.weight_grad import DeferredGrads

TOKENS, IN, OUT = 6, 8, 12


def backward(output: Tensor, grad: Tensor | None = None, split: bool = True) -> None:
    """B and W."""
    if not split:
        output.backward(grad)
        return
    deferred = DeferredGrads()
    with deferred:
        output.backward(grad)
    deferred.run()


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            assert got[name].dtype == tensor.dtype, name
            assert torch.equal(got[name], tensor), f"{name}: {(got[name] - tensor).abs().max()}"


def train(
    module: nn.Module, make_input: Callable[[], Tensor], num_microbatches: int, split: bool, autocast: bool = False
) -> dict[str, Tensor | None]:
    """Outputs, input gradients and parameter gradients after some microbatches."""
    results = {}
    for microbatch in range(num_microbatches):
        torch.manual_seed(microbatch)
        x = make_input()
        if x.is_floating_point():
            x.requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            output = module(x)
        torch.manual_seed(100 + microbatch)
        backward(output, torch.randn(output.shape).to(output.dtype), split)
        results[f"output {microbatch}"], results[f"input {microbatch}"] = output.detach(), x.grad
    return {**results, **gradients(module)}


def compare(plain: nn.Module, make_input: Callable[[], Tensor], **options: Any) -> None:
    """One microbatch, and three, split and unsplit: as torch's layers have it, bit for bit."""
    at_once, split = (weight_grad.convert(copy.deepcopy(plain)) for _ in range(2))
    assert any(type(a) is not type(b) for a, b in zip(plain.modules(), split.modules()))
    for num_microbatches in (1, 3):
        for module in (plain, at_once, split):
            module.zero_grad()
        want = train(plain, make_input, num_microbatches, False, **options)
        assert_same(train(at_once, make_input, num_microbatches, False, **options), want)
        assert_same(train(split, make_input, num_microbatches, True, **options), want)


class Scale(torch.autograd.Function):
    """y = x * a * b, elementwise; a and b receive the same gradient tensor, or views of one number."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, expand: bool) -> Tensor:
        ctx.a, ctx.b, ctx.expand = a, b, expand
        ctx.save_for_backward(x)
        return x * a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Scale.num_backwards += 1
        (x,) = ctx.saved_tensors
        shared = (grad * x).sum().expand(x.shape) if ctx.expand else grad * x
        weight_grad.defer(ctx.a, lambda: shared)
        weight_grad.defer(ctx.b, lambda: shared)
        return grad, None, None, None
