"""Causal attention to several parts, one after the other, on the CPU.

Its fast kernel knows causal attention of whole sequences only. Given a mask, it computes what that hides as well, and a
mask has a number for each pair of positions. Part by part it needs none: a slice sees earlier parts whole, and itself
as if it were a sequence. What parts give is merged by the logarithms of their sums of exponentials, as blocks are in
FlashAttention (https://arxiv.org/abs/2205.14135), and the backward of each part takes the merged ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["AttentionByParts", "can_go_by_parts"]

FLASH_ATTENTION = 1  # torch.nn.attention.SDPBackend, which takes long to import


def can_go_by_parts(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Whether torch would take that kernel for a slice alone. `options`: those of `scaled_dot_product_attention`."""
    if query.device.type != "cpu":
        return False
    return bool(torch._fused_sdp_choice(query, key, value, is_causal=True, **options) == FLASH_ATTENTION)


class AttentionByParts(torch.autograd.Function):
    """Called with the scale (None for torch's), the query, and keys and values of each part, the slice's own last."""

    @staticmethod
    def forward(ctx: Any, scale: float | None, query: Tensor, *parts: Tensor) -> Tensor:
        attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        *earlier, own = zip(parts[::2], parts[1::2])
        output, logsumexp = attend(query, *own, 0.0, True, scale=scale)
        output = output.to(logsumexp.dtype)
        for part in earlier:
            of_part, its_logsumexp = attend(query, *part, 0.0, False, scale=scale)
            output.lerp_(of_part.to(output.dtype), torch.sigmoid(its_logsumexp - logsumexp).unsqueeze(-1))
            logsumexp = torch.logaddexp(logsumexp, its_logsumexp)
        merged: Tensor = output.to(query.dtype)
        ctx.save_for_backward(query, merged, logsumexp, *parts)
        ctx.scale = scale
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        query, merged, logsumexp, *parts = ctx.saved_tensors
        *earlier, own = zip(parts[::2], parts[1::2])
        grad_query, *grads = attend_backward(grad, query, *own, merged, logsumexp, 0.0, True, scale=ctx.scale)
        for part in reversed(earlier):
            of_query, *of_part = attend_backward(grad, query, *part, merged, logsumexp, 0.0, False, scale=ctx.scale)
            grad_query += of_query
            grads = [*of_part, *grads]
        return None, grad_query, *grads
