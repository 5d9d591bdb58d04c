"""Convolutions whose backward returns the input's gradient at once and defers those of weight and bias."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .aliasing import SavedTensor, save_for_w
from .layer_base import Layer, add, as_autocast, can_defer, deferred_gradient, once_differentiable

Numbers = int | Sequence[int]


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Numbers = 1,
    padding: str | Numbers = 0,
    dilation: Numbers = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv1d` or `F.conv2d`, by the weight, with deferred gradients of weight and bias; arguments as torch has them.
    Where `padding` is "same" or "valid", torch computes the gradients, in B."""
    num_dims = weight.dim() - 2
    if isinstance(padding, str) or not can_defer(weight):
        return (F.conv1d, F.conv2d)[num_dims - 1](x, weight, bias, stride, padding, dilation, groups)
    sizes = [[one] * num_dims if isinstance(one, int) else list(one) for one in (stride, padding, dilation)]
    is_batched = x.dim() == weight.dim()
    output: Tensor = _Convolution.apply(
        x if is_batched else x.unsqueeze(0), weight, bias, *sizes, False, [0] * num_dims, groups
    )
    return output if is_batched else output.squeeze(0)


conv1d = conv2d  # by the weight's dimensions


class _Convolution(Layer):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
        ctx.weight, ctx.bias, ctx.options = weight, bias, options
        x, cast_weight, bias = as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        return torch.convolution(x, cast_weight, bias, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, *_ = ctx.needs_input_grad
        grad_x = _gradients(grad, x, weight, ctx.options, True, False, False)[0] if needs_x else None
        saved_grad, saved_x, rest = save_for_w(grad), SavedTensor(x.detach()), (ctx.weight.detach(), ctx.options)

        @functools.cache  # torch computes both together
        def both() -> Sequence[Tensor]:
            return _gradients(saved_grad.get(), saved_x.get(), *rest, False, True, needs_bias)

        grads: list[Tensor | None] = [None, None]
        for number, parameter in enumerate((ctx.weight, ctx.bias)[: 1 + needs_bias], 1):
            compute = functools.partial(_take, both, number, parameter.dtype)
            grads[number - 1] = deferred_gradient(ctx, number, parameter, compute, functools.partial(add, compute))
        return grad_x, *grads, *[None] * len(ctx.options)


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, options: Any, *are_wanted: bool) -> Sequence[Tensor]:
    """Those of x, weight and bias. For the last two only the weight's shape and layout count."""
    backward = torch.ops.aten.convolution_backward
    return backward(grad, x, weight.to(x.dtype), [len(weight)], *options, are_wanted)  # type: ignore[no-any-return]


def _take(both: Callable[[], Sequence[Tensor]], number: int, dtype: torch.dtype) -> Tensor:
    return both()[number].to(dtype)
