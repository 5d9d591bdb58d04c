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

__all__ = ["conv1d", "conv2d"]

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

    Raises:
        ValueError: `padding` is a string other than "same" and "valid", or "same" with a stride.
    """
    num_dims = weight.dim() - 2
    if not can_defer(weight):
        output: Tensor = getattr(F, f"conv{num_dims}d")(x, weight, bias, stride, padding, dilation, groups)
        return output
    stride, dilation = _per_dimension(stride, num_dims), _per_dimension(dilation, num_dims)
    if isinstance(padding, str):
        if padding not in ("same", "valid") or (padding == "same" and any(step != 1 for step in stride)):
            raise ValueError(
                f'padding must be numbers, "valid", or with stride 1 "same", got "{padding}" with stride {stride}.'
            )
        totals = [(padding == "same") * step * (size - 1) for step, size in zip(dilation, weight.shape[2:])]
        if any(total % 2 for total in totals):  # torch too pads one side by the rest
            x = F.pad(x, [side for total in reversed(totals) for side in (0, total % 2)])
        padding = [total // 2 for total in totals]
    options = (stride, _per_dimension(padding, num_dims), dilation, False, [0] * num_dims, groups)
    is_batched = x.dim() == weight.dim()
    output = _Convolution.apply(x if is_batched else x.unsqueeze(0), weight, bias, *options)
    return output if is_batched else output.squeeze(0)


conv1d = conv2d
"""The same function as `conv2d`: it goes by the weight's dimensions."""


def _per_dimension(value: Numbers, num_dims: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * num_dims if len(values) == 1 else values


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
        of_all = functools.partial(_gradients, options=ctx.options)
        grad_x = of_all(grad, x, weight, mask=[True, False, False])[0] if needs_x else None
        saved_x, saved_grad, shape = SavedTensor(x.detach()), save_for_w(grad), ctx.weight.detach()
        mask = [False, True, needs_bias]

        @functools.cache  # torch computes both together
        def both() -> Sequence[Tensor]:
            return of_all(saved_grad.get(), saved_x.get(), shape, mask=mask)

        grads: list[Tensor | None] = [None, None]
        for number, parameter in enumerate((ctx.weight, ctx.bias)[: 1 + needs_bias], 1):
            compute = functools.partial(_take, both, number, parameter.dtype)
            grads[number - 1] = deferred_gradient(ctx, number, parameter, compute, functools.partial(add, compute))
        return grad_x, *grads, *[None] * len(ctx.options)


def _gradients(
    grad: Tensor, x: Tensor, weight: Tensor, options: Sequence[Any], mask: Sequence[bool]
) -> Sequence[Tensor]:
    """Those of x, weight and bias, where `mask` has them. For the last two only the weight's shape and layout count."""
    backward = torch.ops.aten.convolution_backward
    return backward(grad, x, weight.to(x.dtype), None, *options, mask)  # type: ignore[no-any-return]


def _take(both: Callable[[], Sequence[Tensor]], number: int, dtype: torch.dtype) -> Tensor:
    return both()[number].to(dtype)
