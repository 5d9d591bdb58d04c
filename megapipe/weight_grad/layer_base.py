"""What layers have in common whose backward returns the input's gradient at once and defers the weight's.

Each is one autograd Function with the arithmetic of torch's own layer. It keeps the parameter itself, for `defer`, and
saves what torch saves, except for the weight under autocast, which is cast again. A deferred computation refers to the
layer's input and output gradient and to nothing else. Gradients of biases are sums, cheap beside the rest, so they are
returned in B.

On CPU gradients are torch's to the bit: products are rounded before they are added. On other devices they are added in
one go, which rounds once.

Torch's layer runs where nothing can be deferred: the weight is frozen, was received from another stage, or was computed
from others (weight norm, parametrizations, `functional_call`), to which autograd must carry its gradient on; it is
complex, so its gradient takes conjugates; torch.compile or a transform of torch.func is at work; or a stage is being
captured as a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from .accumulation import has_main_grad
from .deferred import defer, deferring_to, is_capturing


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward that has no graph of its own, and says so. With torch's decorator a gradient that depends on the input
    alone, as torch.autograd.functional.hessian differentiates it, is a constant."""

    def once(ctx: Any, *grads: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "second derivatives (create_graph) go through a layer that defers its weight gradient, a captured "
                "stage, or a collective or slice of megapipe, which have none: use torch's own layers there, as with "
                "PipelineStage(..., convert=False)."
            )
        return backward(ctx, *grads)

    return once


class LayerFunction(Function):
    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The call without torch's own search for what transforms of torch.func have left behind, which takes longer
        than the backward of a small layer. Where one is at work `can_defer` refuses."""
        return super(Function, cls).apply(*args)  # type: ignore[misc]


def add(compute: Callable[[], Tensor], target: Tensor) -> None:
    target.add_(compute())


def can_defer(weight: Tensor) -> bool:
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad or weight.is_complex():
        return False
    if not weight.is_leaf or not torch.is_grad_enabled():
        return False
    return not is_capturing() and not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()


def deferred_gradient(
    ctx: Any, number: int, parameter: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], None]
) -> Tensor | None:
    """Defer the gradient of a parameter, given with its number among the inputs. Returns it where autograd must have
    it: hooks of the parameter see a gradient before it is added, `torch.autograd.grad` may have asked for it, and that
    of a leaf which is no parameter, but was received or kept by an earlier slice, travels on when B ends. And on CPU
    where nothing is deferred, since autograd adds up the contributions of one backward before it adds them to the
    gradient; elsewhere each is added in place, without a temporary of its size."""
    if parameter._backward_hooks or not parameter.is_leaf or not isinstance(parameter, nn.Parameter):
        return compute()
    deferred = deferring_to()
    if deferred is None and parameter.is_cpu and not has_main_grad(parameter):
        return compute()
    try:
        is_wanted = torch._C._will_engine_execute_node(ctx.next_functions[number][0])
    except RuntimeError:  # torch.autograd.grad asked for it
        return compute()
    if not is_wanted:  # neither is it by torch.autograd.grad of other tensors
        return None
    if deferred is None:
        defer(parameter, compute, add_to)
    else:
        deferred.add(parameter, compute, add_to)
    return None


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """What torch.autocast casts to there; None where it is off."""
    is_on = torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if is_on else None


def as_autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands as torch.autocast casts them. Its own casts must not happen within a Function: it would remember the
    cast weight, which is without a graph there, for other users of the weight."""
    if not torch._C._is_any_autocast_enabled():
        return x, weight, bias
    if (dtype := autocast_dtype(x.device.type)) is None:
        return x, weight, bias
    x, weight = (tensor if tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (x, weight))
    weight.requires_grad_()  # or torch makes many small products of a strided input, in place of one
    return x, weight, bias if bias is None or bias.dtype == torch.float64 else bias.to(dtype)
