"""Hooks of weights whose gradients autograd does not accumulate itself."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from .context import backward_context

_NOTE = "megapipe"  # a key among the hooks, whose other keys are numbers


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
    for key, hook in list(post_accumulate_hooks(weight).items()):
        if key != _NOTE:
            hook(weight)


def call_hooks_after_backward(weight: Tensor) -> None:
    """Call the hooks once when the backward under way ends, however often it uses the weight. If something else returns
    a gradient for the weight, autograd calls them, and this does nothing."""
    task = torch._C._current_graph_task_id()
    if task == -1:  # outside of any backward
        call_hooks(weight)
        return
    to_call = backward_context.hooks_to_call.get(task)
    if to_call is None:
        backward_context.hooks_to_call[task] = to_call = HooksToCall()
        Variable._execution_engine.queue_callback(to_call)
    to_call.weights[weight] = None
    post_accumulate_hooks(weight)[_NOTE] = _note_call


class HooksToCall:
    """The weights whose hooks are called when a backward ends. That backward owns it, should it fail."""

    def __init__(self) -> None:
        self.weights: dict[Tensor, None] = {}

    def __call__(self) -> None:
        for weight in self.weights:
            call_hooks(weight)


def _note_call(weight: Tensor) -> None:
    """A hook itself: autograd has called the others."""
    to_call = backward_context.hooks_to_call.get(torch._C._current_graph_task_id())
    if to_call is not None:
        to_call.weights.pop(weight, None)


def pass_through_weights(*weights: Tensor) -> None:
    """A backward that reaches the weights without a gradient."""
    _PassThrough.apply(*weights).backward()  # type: ignore[no-untyped-call]


class _PassThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.num_weights)


@functools.cache
def autograd_calls_hooks_without_gradient() -> bool:
    """Whether this torch calls post-accumulate-grad hooks also where a Function returned None: newer ones do."""
    called: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        pass_through_weights(leaf)
    return bool(called)
