"""Layers whose backward returns the input's gradient at once and defers the weight's: `layer_base.py` has the rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .aliasing import SavedTensor, save_for_w
from .layer_base import LayerFunction, add, as_autocast, can_defer, deferred_gradient, once_differentiable
from .products import add_weight_gradient, cast, rows, weight_gradient


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` with a deferred weight gradient.

    Args:
        x: [..., in].
        weight: [out, in].
        bias: [out].

    Returns:
        [..., out].
    """
    if weight.dim() != 2 or not can_defer(weight):  # F.linear takes a vector, too
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)  # type: ignore[no-any-return]


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`torch.addmm(bias, x, weight)` over the last dimension, [..., out], with a deferred weight gradient.

    Args:
        x: [..., in].
        weight: [in, out].
        bias: [out].
    """
    if not can_defer(weight):
        return torch.addmm(bias, rows(x), weight).view(*x.shape[:-1], weight.shape[1])
    return _TransposedLinear.apply(x, weight, bias)  # type: ignore[no-any-return]


def embedding(tokens: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """`F.embedding` with a deferred weight gradient.

    Args:
        tokens: integers [...].
        weight: [rows, hidden].
        padding_idx: the row that gets no gradient.

    Returns:
        [..., hidden].
    """
    if not can_defer(weight):
        return F.embedding(tokens, weight, padding_idx)
    return _Embedding.apply(tokens, weight, padding_idx)  # type: ignore[no-any-return]


class _Linear(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.weight = weight
        x, cast_weight, bias = as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        ctx.adds_bias_apart = not x.is_contiguous()  # torch does, so the bias' gradient is one sum over all dimensions
        output = F.linear(x, cast_weight, bias)
        # Detached from its base, a matrix: autograd refuses to change a view made in here in place, as ReLU may do.
        return output.detach() if output._is_view() else output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_rows = rows(grad)
        grad_x = grad_rows.mm(cast(weight, x.dtype)).view(x.shape) if needs_x else None
        grad_bias = None
        if needs_bias:
            grad_bias = grad.sum_to_size(grad.shape[-1]) if ctx.adds_bias_apart else grad_rows.sum(0)
        both = SavedTensor(x.detach()), save_for_w(grad)  # without the graph behind it
        compute = partial(_linear_gradient, *both, ctx.weight.dtype)
        add_to = partial(add, compute) if x.is_cpu else partial(_add_linear, *both)
        return grad_x, deferred_gradient(ctx, 1, ctx.weight, compute, add_to), grad_bias


class _TransposedLinear(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.weight = weight
        x, cast_weight, cast_bias = as_autocast(x, weight, bias)
        ctx.save_for_backward(x, weight)
        assert cast_bias is not None
        return torch.addmm(cast_bias, rows(x), cast_weight).view(*x.shape[:-1], weight.shape[1]).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias = ctx.needs_input_grad
        grad_x = rows(grad).mm(cast(weight, x.dtype).t()).view(x.shape) if needs_x else None
        both = save_for_w(grad), SavedTensor(x.detach())  # as a linear layer from the output to the input
        compute = partial(_linear_gradient, *both, ctx.weight.dtype)
        add_to = partial(add, compute) if x.is_cpu else partial(_add_linear, *both)
        return grad_x, deferred_gradient(ctx, 1, ctx.weight, compute, add_to), rows(grad).sum(0) if needs_bias else None


def _linear_gradient(x: SavedTensor, grad: SavedTensor, dtype: torch.dtype) -> Tensor:
    return cast(weight_gradient(rows(x.get()), rows(grad.get())), dtype)


def _add_linear(x: SavedTensor, grad: SavedTensor, target: Tensor) -> None:
    add_weight_gradient(target, rows(x.get()), rows(grad.get()))


class _Embedding(LayerFunction):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, padding_idx: int | None) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        ctx.padding = -1 if padding_idx is None else padding_idx % len(weight)  # no token is -1
        return F.embedding(tokens, weight, padding_idx)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        both = SavedTensor(tokens), save_for_w(grad)
        compute = partial(_embedding_gradient, *both, len(ctx.weight), ctx.padding)
        add_to = partial(_add_embedding, *both, ctx.padding)
        return None, deferred_gradient(ctx, 1, ctx.weight, compute, add_to), None


def _embedding_gradient(tokens: SavedTensor, grad: SavedTensor, num_rows: int, padding: int) -> Tensor:
    return _sum_rows(tokens.get(), grad.get(), num_rows, padding)


def _sum_rows(tokens: Tensor, grad: Tensor, num_rows: int, padding: int) -> Tensor:
    return torch.ops.aten.embedding_dense_backward(grad, tokens, num_rows, padding, False)  # type: ignore[no-any-return]


def _add_embedding(kept_tokens: SavedTensor, kept_grad: SavedTensor, padding: int, target: Tensor) -> None:
    """First the sums over equal tokens, as autograd has them, then to their rows: a temporary as large as the output
    instead of the weight. No size here depends on the tokens' values, so an accelerator need not be waited for."""
    tokens, grad = kept_tokens.get(), kept_grad.get()
    if not target.is_cpu:
        grad = grad.to(target.dtype)
    if tokens.numel() >= len(target) or grad.dtype != target.dtype:
        target.add_(_sum_rows(tokens, grad, len(target), padding))
        return
    tokens = tokens.reshape(-1).long()
    in_order, order = tokens.sort()
    num_tokens = len(order)
    is_new = in_order[1:] != in_order[:-1]
    sums_of = torch.zeros_like(order)  # which sum each token belongs to
    sums_of[order[1:]] = is_new.cumsum(0)
    rows_of = torch.zeros_like(order).scatter_(0, sums_of, tokens)  # unused sums are 0: any row will do
    sums_of = sums_of.masked_fill_(tokens == padding, num_tokens)
    sums = _sum_rows(sums_of, rows(grad), num_tokens + 1, num_tokens)
    target.index_add_(0, rows_of, sums[:-1])
