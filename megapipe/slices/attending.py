"""Causal attention of one slice to itself and to the slices before it.

The fast kernel of the CPU knows causal attention of whole sequences only. Given a mask, it computes what that hides as
well, and a mask has a number for each pair of positions. Part by part it needs none: a slice sees earlier parts whole,
and itself as if it were a sequence. What parts give is merged by the logarithms of their sums of exponentials, as
blocks are in FlashAttention (https://arxiv.org/abs/2205.14135), and the backward of each part takes the merged ones.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from ..weight_grad import autocast_dtype, once_differentiable
from .state import current, earlier, keep

_FLASH_ATTENTION = 1  # torch.nn.attention.SDPBackend, which takes long to import


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    owner: Hashable,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
    window: int | None = None,
    document_ids: Tensor | None = None,
) -> Tensor:
    """Causal `scaled_dot_product_attention` that goes on from slice to slice: positions of this slice see those of the
    slices before it, and gradients flow back there. Where sequences are whole, it is torch's.

    Args:
        query: [batch, heads, length, head size], of this slice.
        key, value: [batch, heads, length, head size], of this slice; with rotary positions, turned by them already.
        owner: the layer whose attention this is (`self`). Each calls it once in a slice.
        attn_mask: what positions may see besides being earlier: booleans, or numbers to add to the scores, without
            gradients. [batch, heads, length, positions up to the end of this slice], or of fewer dimensions.
        dropout_p: drawn anew in each slice, so it differs from that of a whole sequence.
        scale, enable_gqa: torch's.
        window: how many positions each sees, itself the last of them (a sliding window). Default: all before it.
        document_ids: [batch, length], of this slice. Positions see those of the same number only (packed sequences).

    Returns:
        [batch, heads, length, head size of value].

    Raises:
        ValueError: if sizes do not fit together, or are not those of this slice.
    """
    _check(query, key, attn_mask, window, document_ids)
    query, key, value = _as_autocast(query, key, value)
    own = (key, value) if document_ids is None else (key, value, document_ids)
    parts = [*_in_reach(earlier(owner), window), own]
    keep(owner, *own)
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    call = _Call(len(own), window, options)
    flat = [tensor for part in parts for tensor in part]
    sees_all = window is None or window >= sum(part[0].shape[-2] for part in parts)
    is_plain = sees_all and attn_mask is None and document_ids is None
    if len(parts) > 1 and is_plain and _can_go_by_parts(query, key, value, **options):
        return _AttentionByParts.apply(scale, query, *flat)  # type: ignore[no-any-return, no-untyped-call]
    if len(parts) == 1 or not torch.is_grad_enabled():
        return call.attend(query, *call.join(query, attn_mask, flat))
    return _Attention.apply(call, query, attn_mask, *flat)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True)
class _Call:
    """One call of `attention`, without its tensors."""

    tensors_per_part: int
    window: int | None
    options: dict[str, Any]

    def join(
        self, query: Tensor, attn_mask: Tensor | None, parts: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys, values, and the mask; None if that is causal and no more."""
        step = self.tensors_per_part
        keys, values = (_join(parts[number::step], -2) for number in range(2))
        ids = _join(parts[2::step], -1) if step == 3 else None
        length, total = query.shape[-2], keys.shape[-2]
        window = total if self.window is None else self.window
        if attn_mask is None and ids is None and window >= total:
            if length == total or query.device.type != "cpu":
                return keys, values, None
            return keys, values, query.new_full((length, total), float("-inf")).triu_(total - length + 1)
        positions = torch.arange(total, device=query.device)
        own = positions[total - length :, None]
        seen = positions <= own
        if window < total:
            seen &= positions > own - window
        if ids is not None:
            seen = seen & (ids[:, None, total - length :, None] == ids[:, None, None, :])
        if attn_mask is None:
            attn_mask = query.new_zeros(())
        elif attn_mask.shape[-1] > total:  # earlier slices are out of reach
            attn_mask = attn_mask[..., -total:]
        if attn_mask.dtype == torch.bool:
            seen = seen & attn_mask
            attn_mask = query.new_zeros(())
        return keys, values, attn_mask.to(query.dtype).masked_fill(~seen, float("-inf"))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        length, total = query.shape[-2], key.shape[-2]
        if mask is None and length == total:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, **self.options)
        if mask is not None:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.options)
        # The fastest kernels take no mask, but this, which torch's function knows by its type.
        from torch.nn.attention.bias import causal_lower_right  # which takes long to import

        bias: Any = causal_lower_right(length, total)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, **self.options)


class _Attention(torch.autograd.Function):
    """Attention to several parts. It keeps these for its backward instead of what they are joined to, which every slice
    would keep anew, and the mask: they are joined again in the backward.

    The attention has a graph of its own that holds no tensor, so that all are saved as autograd saves them, and a part
    of the model that is computed again (activation checkpointing) need not save them.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, query: Tensor, attn_mask: Tensor | None, *parts: Tensor) -> Tensor:
        keys, values, mask = call.join(query, attn_mask, parts)
        saved = _Saved(keys, values, mask)
        with torch.enable_grad(), saved_tensors_hooks(saved.pack, saved.unpack):
            root = torch.empty(0, requires_grad=True)
            inputs = _WithoutHolding.apply(root, query.detach(), keys, values)  # type: ignore[no-untyped-call]
            output = call.attend(inputs[0], inputs[1], inputs[2], mask)
        ctx.save_for_backward(query, attn_mask, *parts, *saved.others)
        ctx.call, ctx.saved, ctx.num_parts = call, saved, len(parts)
        ctx.inputs, ctx.output = [_edge(tensor) for tensor in inputs], _edge(output)
        saved.clear()
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved
        query, attn_mask, *tensors = ctx.saved_tensors
        parts = tensors[: ctx.num_parts]
        saved.fill(call.join(query, attn_mask, parts), tensors[ctx.num_parts :])
        grad_query, *grads = torch.autograd.Variable._execution_engine.run_backward(
            (ctx.output,),
            (grad,),
            keep_graph=True,  # it holds nothing
            create_graph=False,
            inputs=tuple(ctx.inputs),
            allow_unreachable=False,
            accumulate_grad=False,
        )
        saved.clear()
        lengths = [key.shape[-2] for key in parts[:: call.tensors_per_part]]
        keys, values = (joined.split(lengths, -2) for joined in grads)  # type: ignore[no-untyped-call]
        rest = (None,) * (call.tensors_per_part - 2)
        return None, grad_query, None, *(grad for both in zip(keys, values) for grad in (*both, *rest))


class _WithoutHolding(torch.autograd.Function):
    """Its outputs are its inputs with gradients. Leaves would be held by the graph."""

    @staticmethod
    def forward(ctx: Any, root: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors


class _Saved:
    """What attention saves for its backward: parts of the joined tensors by their place, and others."""

    def __init__(self, *joined: Tensor | None) -> None:
        self.others: list[Tensor] = []
        self._joined = joined

    def pack(self, tensor: Tensor) -> tuple[Any, ...]:
        for number, joined in enumerate(self._joined):
            if joined is not None and joined.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr():
                return number, tensor.size(), tensor.stride(), tensor.storage_offset()
        self.others.append(tensor.detach())
        return (len(self.others) - 1,)

    def unpack(self, packed: tuple[Any, ...]) -> Tensor:
        number, *place = packed
        tensor = self._joined[number] if place else self.others[number]
        assert tensor is not None
        return torch.as_strided(tensor, *place) if place else tensor

    def fill(self, joined: Sequence[Tensor | None], others: list[Tensor]) -> None:
        self._joined, self.others = tuple(joined), others

    def clear(self) -> None:
        self._joined, self.others = (), []


def _edge(tensor: Tensor) -> GradientEdge:
    assert tensor.grad_fn is not None
    return GradientEdge(tensor.grad_fn, tensor.output_nr)


def _join(parts: Sequence[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim).contiguous()  # the same strides each time


def _in_reach(parts: list[tuple[Tensor, ...]], window: int | None) -> list[tuple[Tensor, ...]]:
    """The last of the earlier slices, as far as the first position of this one sees."""
    if window is None:
        return parts
    distance = 1
    for number, part in reversed(list(enumerate(parts))):
        if distance >= window:
            return parts[number + 1 :]
        distance += part[0].shape[-2]
    return parts


def _as_autocast(*tensors: Tensor) -> list[Tensor]:
    """The tensors as autocast would give them to attention, so that they are kept so."""
    dtype = autocast_dtype(tensors[0].device.type)
    return [tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in tensors]


def _check(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, window: int | None, document_ids: Tensor | None
) -> None:
    length, this = query.shape[-2], current()
    if key.shape[-2] != length:
        raise ValueError(
            f"attention to earlier positions needs keys for its {length} queries and no others, got {key.shape[-2]}."
        )
    if this is not None and length != this.length:
        raise ValueError(
            f"slice {this.index} of {this.num_slices} has {this.length} positions, but attention got {length}: let "
            "the model cut whole sequences, by slices.cut(tensor, dim)."
        )
    stop = length if this is None else this.stop
    if attn_mask is not None and attn_mask.shape[-1] != stop:
        raise ValueError(f"attn_mask of shape {list(attn_mask.shape)} must end in {stop}, the positions seen so far.")
    if attn_mask is not None and attn_mask.requires_grad:
        raise ValueError("attn_mask must not require a gradient: detach it.")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, got {window}.")
    if document_ids is not None and document_ids.shape != (len(query), length):
        raise ValueError(
            f"document_ids must be of shape {[len(query), length]} (batch, length), got {list(document_ids.shape)}."
        )


def _can_go_by_parts(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> bool:
    """Whether torch would take that kernel for a slice alone. `options`: those of `scaled_dot_product_attention`."""
    if query.device.type != "cpu":
        return False
    return bool(torch._fused_sdp_choice(query, key, value, is_causal=True, **options) == _FLASH_ATTENTION)


class _AttentionByParts(torch.autograd.Function):
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
