"""Experts of transformers' models by `weight_grad.grouped_linear`: their weight gradients are left to W, and a captured
stage has one operator for all of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from ...weight_grad import grouped_linear

IMPLEMENTATION = "megapipe"
"""The `experts_implementation` of a config, beside transformers' own."""


def register() -> None:
    """Let configs name it."""
    of_transformers: Any = importlib.import_module("transformers.integrations.moe")
    of_transformers.ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, forward)


def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers' "grouped_mm" computes.

    Args:
        self: the module with the experts' weights.
        hidden_states: [tokens, hidden].
        top_k_index, top_k_weights: the experts of each token and how much each counts, [tokens, experts of a token].

    Raises:
        ValueError: transformers has shared the experts out among ranks.
    """
    if self._is_expert_parallel:
        raise ValueError(
            f'experts_implementation="{IMPLEMENTATION}" takes all experts of a layer on one rank, but transformers has '
            'shared these out: take its "grouped_mm".'
        )
    topk = top_k_index.shape[1]
    in_order, order = top_k_index.flatten().sort(stable=True)
    counts = (in_order == torch.arange(self.num_experts, device=in_order.device).unsqueeze(1)).sum(1)

    def project(x: Tensor, name: str) -> Tensor:
        weight = getattr(self, name)
        y = grouped_linear(x, weight.transpose(1, 2) if self.is_transposed else weight, counts)
        return y + getattr(self, f"{name}_bias")[in_order] if self.has_bias else y

    y = project(hidden_states[order // topk], "gate_up_proj" if self.has_gate else "up_proj")
    y = project(self._apply_gate(y) if self.has_gate else self.act_fn(y), "down_proj")
    if self.has_post_expert_norm:
        y = self.post_expert_norm(y)
    y = (y * top_k_weights.flatten()[order].unsqueeze(-1))[order.argsort()]
    total: Tensor = y.view(-1, topk, y.shape[1]).sum(1)
    return total.to(hidden_states.dtype)
