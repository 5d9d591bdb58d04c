"""Modules that defer their weight gradients by themselves, as transformer-engine's do with `delay_wgrad_compute`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from ..weight_grad import add_gradient

__all__ = ["find_delayed", "run_delayed"]


def find_delayed(module: nn.Module) -> list[Any]:
    """The innermost modules with a `backward_dw()` method, which computes the oldest gradients that they have deferred.
    A module around others that have it, as in Megatron, only passes the call on."""
    inner = [found for child in module.children() for found in find_delayed(child)]
    return inner or ([module] if callable(getattr(module, "backward_dw", None)) else [])


def run_delayed(modules: Iterable[Any]) -> None:
    """Call `backward_dw()` of each. It may assign the gradient, or keep one that is there. So it finds none, and its
    gradient is added to the one that was there."""
    for module in modules:
        before = [(p, p.grad) for p in module.parameters() if p.requires_grad]
        for parameter, _ in before:
            parameter.grad = None
        module.backward_dw()
        for parameter, grad in before:
            computed, parameter.grad = parameter.grad, grad
            if computed is not None:
                add_gradient(parameter, computed)
