"""torch's layers, with deferred weight gradients: the same parameters, names, options, state_dict and repr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import convolution, layers
from .grouped import grouped_linear

Module = TypeVar("Module", bound=nn.Module)


class Linear(nn.Linear):
    """[..., in] to [..., out]. See `layers.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return layers.linear(input, self.weight, self.bias)


class Embedding(nn.Embedding):
    """Integers [...] to [..., hidden]. With `max_norm`, `scale_grad_by_freq` or `sparse` its gradient is computed in B,
    as torch does."""

    def forward(self, input: Tensor) -> Tensor:
        if self.max_norm is not None or self.scale_grad_by_freq or self.sparse:
            return super().forward(input)
        return layers.embedding(input, self.weight, self.padding_idx)


def _conv_forward(layer: nn.Conv1d | nn.Conv2d, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    padding: str | Sequence[int] | int = layer.padding
    if layer.padding_mode != "zeros":
        input, padding = F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), 0
    return convolution.conv2d(input, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


class Conv1d(nn.Conv1d):
    """[batch, in, length] or [in, length] to the same with `out` channels and torch's new length."""

    _conv_forward = _conv_forward


class Conv2d(nn.Conv2d):
    """[batch, in, height, width] or [in, height, width] to the same with `out` channels and torch's new sizes."""

    _conv_forward = _conv_forward


class GroupedLinear(nn.Module):
    """A linear layer per expert, without bias: [tokens, in] to [tokens, out]. `weight` is [experts, out, in].

    Its forward takes the tokens sorted by expert, and the number of tokens of each. See `grouped_linear`.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights as nn.Linear does."""
        bound = 1 / math.sqrt(self.weight.shape[2]) if self.weight.shape[2] else 0.0
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, input: Tensor, tokens_per_expert: Sequence[int] | Tensor) -> Tensor:
        return grouped_linear(input, self.weight, tokens_per_expert)

    def extra_repr(self) -> str:
        num_experts, out_features, in_features = self.weight.shape
        return f"num_experts={num_experts}, in_features={in_features}, out_features={out_features}"


_DEFERRING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: Linear,
    nn.Embedding: Embedding,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
}


def let_convert(kind: type[nn.Module], deferring: type[nn.Module]) -> None:
    """Let `convert` swap another class of layers, `kind`, for `deferring`, which is derived from it."""
    _DEFERRING[kind] = deferring


def convert(module: Module) -> Module:
    """Make the nn.Linear, nn.Embedding, nn.Conv1d and nn.Conv2d layers in `module`, itself included, defer, and those
    that `let_convert` was told of.

    A layer's class is swapped and nothing else: its parameters, hooks and identity stay. Subclasses of these layers are
    left alone, since they may compute something else; so are layers with parametrizations, which are subclasses, and
    the projections of nn.MultiheadAttention, which uses them as plain tensors. Their gradients are computed in B. A
    second call does nothing.

    Returns:
        `module`.
    """
    for layer in module.modules():
        if type(layer) in _DEFERRING:
            layer.__class__ = _DEFERRING[type(layer)]
    return module
