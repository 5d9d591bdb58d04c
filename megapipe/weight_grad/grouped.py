"""Linear layers of experts: one product for each, of as many rows as it has tokens.

In bfloat16, where the device can, all products are one kernel (`torch._grouped_mm`), which reads the numbers of rows
from the device. In a captured stage each is one operator, too: how many rows which expert has is a tensor, and no size
in the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from .aliasing import SavedTensor, save_for_w
from .deferred import is_capturing
from .layer_base import (
    LayerFunction,
    add,
    as_autocast,
    autocast_dtype,
    can_defer,
    deferred_gradient,
    once_differentiable,
)
from .products import add_weight_gradient, cast


def grouped_linear(x: Tensor, weight: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
    """A linear layer per expert, without bias, with a deferred weight gradient.

    Args:
        x: [tokens, in], the tokens of the first expert first, then those of the second.
        weight: [experts, out, in].
        tokens_per_expert: one number per expert, 0 allowed. A tensor on an accelerator is read back, which waits for
            it, except in bfloat16 where the device multiplies groups in one kernel. The weight gradient is then rounded
            to bfloat16 before it is added to another.

    Returns:
        [tokens, out], in the order of x.

    Raises:
        ValueError: `tokens_per_expert` has another length than `weight`, another sum than x has rows, or a negative
            number. What an accelerator has need not be found out.
    """
    if is_capturing():
        if (dtype := autocast_dtype(x.device.type)) is not None:
            x, weight = (tensor if tensor.dtype == torch.float64 else cast(tensor, dtype) for tensor in (x, weight))
        return torch.ops.megapipe.grouped_linear(x, weight, _as_tensor(tokens_per_expert))  # type: ignore[no-any-return]
    if not can_defer(weight):
        parts = torch.split(x, _as_list(tokens_per_expert, x, len(weight)))
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(parts, weight)])
    return _GroupedLinear.apply(x, weight, _as_tensor(tokens_per_expert))  # type: ignore[no-any-return]


class _GroupedLinear(LayerFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        x, cast_weight, _ = as_autocast(x, weight, None)
        if not is_one_kernel(x, cast_weight):
            counts = counts.cpu()  # read once
        ctx.weight, ctx.counts = weight, counts
        ctx.save_for_backward(x, weight)
        return multiply(x, cast_weight, counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = multiply(grad, cast(weight, x.dtype).transpose(1, 2), ctx.counts)
        both = SavedTensor(x.detach()), save_for_w(grad)
        compute = partial(_gradient, *both, ctx.counts, ctx.weight.dtype)
        adds_at_once = x.is_cpu or is_one_kernel(x, grad)
        add_to = partial(add, compute) if adds_at_once else partial(_add_gradient, *both, ctx.counts)
        return grad_x, deferred_gradient(ctx, 1, ctx.weight, compute, add_to), None


def _gradient(kept_x: SavedTensor, kept_grad: SavedTensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(grouped_gradient(kept_x.get(), kept_grad.get(), counts), dtype)


def _add_gradient(kept_x: SavedTensor, kept_grad: SavedTensor, counts: Tensor, target: Tensor) -> None:
    x, grad = kept_x.get(), kept_grad.get()
    sizes = _as_list(counts, x, len(target))
    for part, part_grad, out in zip(torch.split(x, sizes), torch.split(grad, sizes), target):
        if len(part):
            add_weight_gradient(out, part, part_grad)


# The products


def multiply(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """[tokens, in] by [experts, out, in], perhaps strided, to [tokens, out]."""
    if is_one_kernel(x, weight):
        return torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=_ends(counts, x.device))
    sizes = _as_list(counts, x, len(weight))
    output = x.new_empty(len(x), weight.shape[1])
    for part, matrix, out in zip(torch.split(x, sizes), weight, torch.split(output, sizes)):
        torch.mm(part, matrix.t(), out=out)
    return output


def grouped_gradient(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    """[tokens, in] and [tokens, out] to the weight's gradient, [experts, out, in]."""
    if is_one_kernel(x, grad):
        return torch._grouped_mm(grad.contiguous().t(), x.contiguous(), offs=_ends(counts, x.device))
    sizes = _as_list(counts, x, len(counts))
    result = x.new_empty(len(counts), grad.shape[1], x.shape[1])
    for part, part_grad, out in zip(torch.split(x, sizes), torch.split(grad, sizes), result):
        torch.mm(part_grad.t(), part, out=out)
    return result


def is_one_kernel(x: Tensor, other: Tensor) -> bool:
    """Whether the products are one kernel: it wants rows whose bytes are a multiple of 16."""
    has_aligned = not any(size % 8 for size in (x.shape[1], *other.shape[1:]))
    is_half = x.dtype == other.dtype == torch.bfloat16
    return is_half and has_aligned and len(x) > 0 and _multiplies_groups(x.device.type)


@functools.cache
def _multiplies_groups(device_type: str) -> bool:
    """Whether this device, by this torch, multiplies groups of rows in one kernel."""
    with _disable_current_modes():  # torch's fake tensors can what their device cannot
        x = torch.zeros(16, 16, dtype=torch.bfloat16, device=device_type)
        ends = torch.tensor([16], dtype=torch.int32, device=device_type)
        try:
            torch._grouped_mm(x, x.unsqueeze(0).transpose(1, 2), offs=ends)
        except (AttributeError, RuntimeError):  # NotImplementedError is one
            return False
        return True


def _ends(counts: Tensor, device: torch.device) -> Tensor:
    return counts.to(device, non_blocking=True).cumsum(0, dtype=torch.int32)


def _as_tensor(counts: Sequence[int] | Tensor) -> Tensor:
    if isinstance(counts, Tensor):
        return counts
    if any(isinstance(count, torch.SymInt) for count in counts):
        return torch.stack([torch.scalar_tensor(count, dtype=torch.long) for count in counts])
    return torch.tensor(counts, dtype=torch.long)


def _as_list(tokens_per_expert: Sequence[int] | Tensor, x: Tensor, num_experts: int) -> list[int]:
    counts = tokens_per_expert.tolist() if isinstance(tokens_per_expert, Tensor) else list(tokens_per_expert)
    if len(counts) != num_experts or sum(counts) != len(x) or min(counts, default=0) < 0:
        raise ValueError(
            f"tokens_per_expert must share out the {len(x)} rows of x among {num_experts} experts, but it is {counts}, "
            f"{sum(counts)} rows for {len(counts)} experts: give one number per expert of weight."
        )
    return counts


# As operators, for captured stages

_torchs: Any = torch.library  # whose functions have no types
_library = _torchs.Library("megapipe", "FRAGMENT")
_library.define("grouped_linear(Tensor x, Tensor weight, Tensor counts) -> Tensor")
_library.define("grouped_gradient(Tensor x, Tensor grad, Tensor counts) -> Tensor")
_library.impl("grouped_linear", multiply, "CompositeExplicitAutograd")
_library.impl("grouped_gradient", grouped_gradient, "CompositeExplicitAutograd")


def _grouped_linear_shape(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _grouped_gradient_shape(x: Tensor, grad: Tensor, counts: Tensor) -> Tensor:
    return x.new_empty(counts.shape[0], grad.shape[1], x.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, counts = ctx.saved_tensors
    needs_x, needs_weight, _ = ctx.needs_input_grad
    grad_x = torch.ops.megapipe.grouped_linear(grad, weight.transpose(1, 2), counts) if needs_x else None
    return grad_x, torch.ops.megapipe.grouped_gradient(x, grad, counts) if needs_weight else None, None


_torchs.register_fake("megapipe::grouped_linear", _grouped_linear_shape, lib=_library)
_torchs.register_fake("megapipe::grouped_gradient", _grouped_gradient_shape, lib=_library)
_torchs.register_autograd("megapipe::grouped_linear", _differentiate, setup_context=_save, lib=_library)
