"""Hooks of weights whose gradients autograd does not accumulate itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def post_accumulate_hooks(weight: Tensor) -> dict[Any, Any]:
    """The dict itself that autograd calls them from."""
    hooks = getattr(weight, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


class SilencedHooks:
    """Post-accumulate-grad hooks taken off their weights for a while: autograd would call them too early."""

    def __init__(self) -> None:
        self._hooks: dict[Tensor, dict[Any, Any]] = {}

    def silence(self, weight: Tensor) -> None:
        hooks = post_accumulate_hooks(weight)
        if hooks and weight not in self._hooks:
            self._hooks[weight] = dict(hooks)
            hooks.clear()

    def restore(self, *weights: Tensor) -> None:
        """Give back the hooks of these weights, or of all."""
        for weight in weights or list(self._hooks):
            post_accumulate_hooks(weight).update(self._hooks.pop(weight, {}))


def call_hooks(weight: Tensor) -> None:
    """Call the post-accumulate-grad hooks of `weight`."""
    for hook in list(post_accumulate_hooks(weight).values()):
        hook(weight)


def pass_through_weights(*weights: Tensor) -> None:
    """A backward that reaches the weights without a gradient. Hooks of `weight.register_hook`, which take it, are not
    called: they were when it was there."""
    hooks = {weight: dict(of_weight) for weight in weights if (of_weight := weight._backward_hooks)}
    for weight in hooks:
        weight._backward_hooks.clear()  # type: ignore[union-attr]
    try:
        _PassThrough.apply(*weights).backward()  # type: ignore[no-untyped-call]
    finally:
        for weight, of_weight in hooks.items():
            weight._backward_hooks.update(of_weight)  # type: ignore[union-attr]


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.num_weights)
