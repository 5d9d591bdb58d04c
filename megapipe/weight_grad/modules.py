"""torch's layers, with deferred weight gradients: the same parameters, names, options, state_dict and repr."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from . import layers
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


_DEFERRING: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: Linear, nn.Embedding: Embedding}


def let_convert(kind: type[nn.Module], deferring: type[nn.Module]) -> None:
    """Let `convert` swap another class of layers, `kind`, for `deferring`, which is derived from it."""
    _DEFERRING[kind] = deferring


def convert(module: Module) -> Module:
    """Make the nn.Linear and nn.Embedding layers in `module`, itself included, defer, and those that `let_convert` was
    told of.

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
