"""Convolutions whose backward returns the input's gradient at once and defers those of weight and bias."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .aliasing import SavedTensor, save_for_w
from .layer_base import Layer, add, as_autocast, can_defer, deferred_gradient, once_differentiable

__all__ = ["conv1d", "conv2d"]


def conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv1d` with deferred gradients of weight and bias.

    Args:
        x: [batch, in, length] or [in, length].
        weight: [out, in / groups, kernel].
        bias: [out].
        stride, padding, dilation, groups: as torch has them; padding may be "same" or "valid".

    Returns:
        [batch, out, new length] or [out, new length].

    Raises:
        ValueError: `padding` is another string, or "same" with a stride.
    """
    if not can_defer(weight):
        return F.conv1d(x, weight, bias, stride, padding, dilation, groups)
    return _convolution(x, weight, bias, stride, padding, dilation, groups)


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """`F.conv2d` with deferred gradients of weight and bias.

    Args:
        x: [batch, in, height, width] or [in, height, width].
        weight: [out, in / groups, kernel height, kernel width].
        bias: [out].
        stride, padding, dilation, groups: as torch has them; padding may be "same" or "valid".

    Returns:
        [batch, out, new height, new width] or [out, new height, new width].

    Raises:
        ValueError: `padding` is another string, or "same" with a stride.
    """
    if not can_defer(weight):
        return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return _convolution(x, weight, bias, stride, padding, dilation, groups)


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
        mask = [True, False, False]
        grad_x = _convolution_backward(grad, x, weight.to(x.dtype), ctx.options, mask)[0] if needs_x else None
        gradients = _ConvolutionGradients(
            SavedTensor(x.detach()), save_for_w(grad), ctx.weight, ctx.options, needs_bias
        )
        grads: list[Tensor | None] = [None, None]
        for number, parameter in enumerate((ctx.weight, ctx.bias) if needs_bias else (ctx.weight,), 1):
            compute = partial(gradients.take, number, parameter.dtype)
            grads[number - 1] = deferred_gradient(ctx, number, parameter, compute, partial(add, compute))
        return grad_x, *grads, *[None] * len(ctx.options)


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: int | Sequence[int],
    padding: str | int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> Tensor:
    num_dims = weight.dim() - 2
    stride, dilation = _per_dimension(stride, num_dims), _per_dimension(dilation, num_dims)
    if isinstance(padding, str):
        x, padding = _pad(x, weight, padding, stride, dilation)
    is_batched = x.dim() == weight.dim()
    options = (stride, _per_dimension(padding, num_dims), dilation, False, [0] * num_dims, groups)
    batch = x if is_batched else x.unsqueeze(0)
    output: Tensor = _Convolution.apply(batch, weight, bias, *options)
    return output if is_batched else output.squeeze(0)


def _pad(
    x: Tensor, weight: Tensor, padding: str, stride: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """The padding on both sides for "same" and "valid", and x padded by the rest of it, as torch does."""
    if padding not in ("same", "valid"):
        raise ValueError(f'padding must be "same", "valid", or numbers, got "{padding}".')
    if padding == "valid":
        return x, [0] * len(dilation)
    if any(step != 1 for step in stride):
        raise ValueError(f'padding "same" needs stride 1, got {list(stride)}: give the padding in numbers.')
    totals = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:])]
    remaining = [side for total in reversed(totals) for side in (0, total % 2)]
    return F.pad(x, remaining) if any(remaining) else x, [total // 2 for total in totals]


def _per_dimension(value: int | Sequence[int], num_dims: int) -> list[int]:
    if isinstance(value, int):
        return [value] * num_dims
    return list(value) * num_dims if len(value) == 1 else list(value)


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, options: tuple[Any, ...], mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    backward = torch.ops.aten.convolution_backward
    return backward(grad, x, weight, None, *options, mask)  # type: ignore[no-any-return]


class _ConvolutionGradients:
    """The gradients of weight and bias, which torch computes together: the first call of `take` keeps the other one."""

    def __init__(
        self, x: SavedTensor, grad: SavedTensor, weight: Tensor, options: tuple[Any, ...], needs_bias: bool
    ) -> None:
        self._needs = x, grad, weight.detach(), options, [False, True, needs_bias]
        self._computed: dict[int, Tensor] = {}

    def take(self, number: int, dtype: torch.dtype) -> Tensor:
        """1 is that of the weight, 2 of the bias, as among the inputs of a convolution."""
        if number not in self._computed:
            x, kept_grad, weight, options, mask = self._needs
            grad = kept_grad.get()
            same_dtype = weight.to(grad.dtype)  # which gives its shape and layout, not its values
            both = _convolution_backward(grad, x.get(), same_dtype, options, mask)
            self._computed = {n: both[n] for n in (1, 2) if mask[n]}
        return self._computed.pop(number).to(dtype)
