"""Adding gradients to `.grad` or `main_grad`, as autograd would."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .context import backward_context
from .grad_hooks import call_hooks, post_accumulate_hooks


class without_grad:  # noqa: N801  # torch.no_grad() takes longer than a small gradient
    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)


class Contributions:
    """The contributions of one backward to one weight.

    On CPU `.grad` is set aside meanwhile. So a gradient that autograd adds there by itself, because something else uses
    the weight too, is found to be one of the contributions.
    """

    def __init__(self, weight: Tensor) -> None:
        self.left: deque[tuple[Callable[[], Tensor], Callable[[Tensor], object] | None]] = deque()
        self.weight = weight
        self._sum: Tensor | None = None
        self._before: Tensor | None = None
        self._adds_up = weight.is_cpu
        self._is_aside = self._adds_up and _main_grad(weight) is None
        if self._is_aside:
            self._before, weight.grad = weight.grad, None
        add_dummy_grad(weight)

    def end(self) -> None:
        """Put `.grad` back, at the end of the backward."""
        if self._is_aside:
            by_autograd, self.weight.grad = self.weight.grad, self._before
            self._is_aside, self._before = False, None
            if by_autograd is not None:
                self.left.append((lambda: by_autograd, None))

    def compute_next(self) -> bool:
        """Compute the next contribution. False if none is left."""
        if not self.left:
            return False
        compute, add_to = self.left.popleft()
        if self._adds_up:
            grad = _gradient(self.weight, compute, is_ours=add_to is not None)
            self._sum = grad if self._sum is None else self._sum + grad
        else:
            accumulate(self.weight, compute, add_to)
        return True

    def accumulate(self) -> None:
        if self._sum is None and len(self.left) == 1:
            accumulate(self.weight, *self.left.popleft())
            return
        while self.compute_next():
            pass
        if self._sum is not None:
            add_gradient(self.weight, self._sum)


def accumulate_all(backwards: dict[int, dict[int, Contributions]]) -> None:
    """Accumulate the contributions of several backwards, then call the hooks once for each weight."""
    computed: dict[int, Tensor] = {}
    with without_grad():
        for contributions in backwards.values():
            for key in list(contributions):
                one = contributions.pop(key)
                one.accumulate()  # which frees them before the next one allocates
                computed[key] = one.weight
    for weight in computed.values():
        call_hooks(weight)


def add_gradient(weight: Tensor, grad: Tensor) -> None:
    """Add a gradient of one microbatch to `main_grad` or `.grad`. The caller has no other use of `grad`."""
    with without_grad():
        accumulate(weight, lambda: grad, lambda target: target.add_(grad))


def accumulate(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None) -> None:
    """Compute a gradient and add it to `main_grad` or `.grad`. See `defer` for the arguments."""
    main_grad = _main_grad(weight)
    target = weight.grad if main_grad is None else main_grad
    if target is None:
        weight.grad = _gradient(weight, compute, is_ours=add_to is not None)
    elif add_to is not None:
        add_to(target)
    else:
        target.add_(compute())
    if main_grad is not None:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's hooks ask for it


def _gradient(weight: Tensor, compute: Callable[[], Tensor], is_ours: bool) -> Tensor:
    """The gradient as it may become `.grad`. The result of our own layers is held by nothing else. Others may return a
    tensor that they use elsewhere too, or an expanded one."""
    grad = compute()
    dtype = getattr(weight, "grad_dtype", weight.dtype) or grad.dtype  # newer torch lets the owner choose, or any
    return grad.to(dtype) if is_ours else grad.to(dtype, copy=True).contiguous()


def has_main_grad(weight: Tensor) -> bool:
    """Whether its gradient is added to its `main_grad`."""
    return _main_grad(weight) is not None


def _main_grad(weight: Tensor) -> Tensor | None:
    """None also if hooks of the owner take the gradient from `.grad` and add it themselves: hooks that do not ask
    `grad_added_to_main_grad`, as Megatron's do, whether that has been done."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "grad_added_to_main_grad") or not post_accumulate_hooks(weight):
        return main_grad
    return None


def add_dummy_grad(weight: Tensor) -> None:
    """Let Megatron's hooks find a gradient. Where reductions overlap they insist on one when autograd has passed by,
    also if `main_grad` has it already. So zeros without memory take its place until the backward ends."""
    dummies: Any = backward_context.dummy_grads
    if dummies is not None and weight.grad is None and _main_grad(weight) is not None:
        weight.grad = dummies[weight] = weight.new_zeros(()).expand_as(weight)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def remove_dummy_grads(dummies: dict[Tensor, Tensor]) -> None:
    """Those that no hook has taken away."""
    for weight, zeros in dummies.items():
        if weight.grad is zeros:
            weight.grad = None
