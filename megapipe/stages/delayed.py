"""Modules that defer their weight gradients by themselves, as transformer-engine's do with `delay_wgrad_compute`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..weight_grad import add_gradient


def find_delayed(module: nn.Module) -> list[Any]:
    """The innermost modules with a `backward_dw()` method, which computes the oldest gradients that they have deferred.
    A module around others that have it, as in Megatron, only passes the call on."""
    inner = [found for child in module.children() for found in find_delayed(child)]
    return inner or ([module] if callable(getattr(module, "backward_dw", None)) else [])


class DelayedGrads:
    """The weight gradients that such modules defer in one backward. Made before it.

    transformer-engine's modules keep them in a queue, `wgrad_store.context`. So a module that a microbatch has not gone
    through is left out, since it fails on an empty queue, and one that it has gone through twice is called twice.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._modules = modules
        self._sizes = [_queue_size(module) for module in modules]
        self._grads = {p: (p.grad, None if p.grad is None else p.grad._version) for p in _trained(modules)}
        self._to_compute: list[tuple[Any, int | None]] = []
        self._complete: set[nn.Parameter] = set()

    def end_backward(self, has_run: bool) -> None:
        """See what the modules have deferred. Some gradients are there already: in fp8, a bias's comes with B."""
        for module, size in zip(self._modules, self._sizes):
            now = _queue_size(module)
            num_deferred = None if now is None or size is None else now - size
            if has_run and num_deferred != 0:
                self._to_compute.append((module, num_deferred))
        for parameter, (grad, version) in self._grads.items():
            if parameter.grad is not grad or (grad is not None and grad._version != version):
                self._complete.add(parameter)
        self._grads.clear()

    def compute(self) -> None:
        """W."""
        for module, num_deferred in self._to_compute:
            if num_deferred is None:
                self._compute(module)
                continue
            size = _queue_size(module)
            assert size is not None
            last = size - num_deferred
            while (_queue_size(module) or 0) > last:
                self._compute(module)

    def _compute(self, module: Any) -> None:
        """Call `backward_dw()`. It may assign the gradient, or keep one that is there. So it finds none, and its
        gradient is added to the one that was there."""
        before = [(p, p.grad) for p in _trained([module]) if p not in self._complete]
        for parameter, _ in before:
            parameter.grad = None
        module.backward_dw()
        for parameter, grad in before:
            computed, parameter.grad = parameter.grad, grad
            if computed is not None:
                add_gradient(parameter, computed)


def _trained(modules: Sequence[Any]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters() if p.requires_grad]


def _queue_size(module: Any) -> int | None:
    """None where the module shows no queue."""
    queue = getattr(getattr(module, "wgrad_store", None), "context", None)
    return None if queue is None else int(queue.qsize())
