"""Optimizers of the tests, and how their results are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

MAX_NORM = 0.5


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-2)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1e-2, momentum=0.9, nesterov=True)


def decay(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0} if parameter.dim() < 2 else {}


def weights_of(chunks: list[Any]) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other))
