"""From B to W: what is deferred, and what is held meanwhile."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from tools.one_layer import IN, OUT, TOKENS, Scale, backward
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megapipe import weight_grad
from megapipe.weight_grad import AT_ONCE, DeferredGrads


@pytest.mark.parametrize(
    ("shape", "use"),
    [
        ((OUT, IN), weight_grad.linear),
        ((TOKENS, IN), lambda x, leaf: Scale.apply(x, leaf, nn.Parameter(torch.ones(TOKENS, IN)), False)),
    ],
    ids=["weight", "function"],
)
def test_only_gradients_of_parameters_are_deferred(shape: tuple[int, ...], use: Callable[..., Tensor]) -> None:
    """What a stage has received, or an earlier slice has kept, may be a layer's weight: a leaf whose gradient travels
    on when B ends. It was left to W, and what the leaf was made from got none of it."""
    x, leaves = torch.randn(TOKENS, IN), [torch.ones(shape, requires_grad=True) for _ in range(2)]
    for leaf, deferred in zip(leaves, (DeferredGrads(), AT_ONCE)):
        with deferred:
            use(x, leaf).square().sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_defer_refuses_what_keeps_no_gradient() -> None:
    with pytest.raises(TypeError, match=r"shape \[2\] that was computed from others"):
        weight_grad.defer(torch.ones(2, requires_grad=True) * 2, lambda: torch.ones(2))


def test_only_inputs_of_layers_are_held_between_b_and_w() -> None:
    model = weight_grad.convert(nn.Sequential(nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.GELU(), nn.Linear(OUT, IN)))
    kept: dict[nn.Module, weakref.ref[Any]] = {}
    for layer in model:
        layer.register_forward_hook(lambda layer, _, out: kept.update({layer: weakref.ref(out.untyped_storage())}))
    deferred = DeferredGrads()
    x = torch.randn(TOKENS, IN)
    loss = model(x).square().sum()
    with deferred:
        loss.backward()
    del loss
    gc.collect()
    alive = [layer for layer, reference in kept.items() if reference() is not None]
    assert alive == [model[2]]  # the GELU's output, which the last layer needs
    deferred.run()
    gc.collect()
    assert kept[model[2]]() is None


def test_w_frees_what_it_has_done() -> None:
    weights = [torch.ones(3, requires_grad=True) for _ in range(2)]
    needed = [torch.ones(3) for _ in weights]
    alive = [weakref.ref(tensor) for tensor in needed]
    seen = []

    def computation(tensor: Tensor) -> Callable[[], Tensor]:
        def compute() -> Tensor:
            seen.append([reference() is not None for reference in alive])
            return tensor * 2

        return compute

    deferred = DeferredGrads()
    for weight, tensor in zip(weights, needed):
        deferred.add(weight, computation(tensor))
    needed.clear()
    del tensor
    deferred.run()
    assert seen == [[True, True], [False, True]]


class Solves(torch.autograd.Function):
    """Its backward runs one of its own, through a layer that defers, and looks at the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, use_reentrant: bool) -> Tensor:
        ctx.layer, ctx.use_reentrant = layer, use_reentrant
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        ctx.layer.zero_grad()
        with torch.enable_grad():
            y = ctx.layer(x.detach().requires_grad_())
            if ctx.use_reentrant:
                y = ctx.layer(checkpoint(ctx.layer, y, use_reentrant=True))
            y.square().sum().backward()
        return grad * ctx.layer.weight.grad.sum(), None, None


class CheckpointedSolves(Solves):
    """Torch's checkpoints leave gradients to W. It was taken for one of them for its name."""


@pytest.mark.parametrize("function", [Solves, CheckpointedSolves])
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_that_is_run_within_b_defers_nothing(use_reentrant: bool, function: Any) -> None:
    """Whoever runs one in a Function's backward, as implicit layers do, goes on with its gradients. These were deferred
    to the W of the B that was under way."""

    def run(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        outer, inner = weight_grad.Linear(IN, IN), weight_grad.Linear(IN, IN)
        seen: list[Tensor] = []
        for layer in (outer, inner):
            layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        for _ in range(2):
            backward(function.apply(outer(torch.randn(TOKENS, IN)), inner, use_reentrant).sum(), split=split)
        return [outer.weight.grad, inner.weight.grad, *seen[-2:]]

    for got, want in zip(run(True), run(False)):
        assert torch.equal(got, want)


class Nodes(torch.autograd.Function):
    """Its backward is that of a graph of its own, whose weight gradients it leaves to W."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.leaves_weight_grads = True
        with torch.enable_grad():
            ctx.output = layer(x.detach())
        return ctx.output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ctx.output.backward(grad)
        return None, None


def test_a_backward_within_b_that_leaves_its_weight_gradients() -> None:
    layer, x, deferred = weight_grad.Linear(IN, IN), torch.randn(TOKENS, IN, requires_grad=True), DeferredGrads()
    output = Nodes.apply(x, layer)
    with deferred:
        output.sum().backward()
    assert layer.weight.grad is None
    deferred.run()
    assert torch.equal(layer.weight.grad, torch.ones(TOKENS, IN).t() @ x)


def test_a_backward_of_another_thread_puts_nothing_off() -> None:
    """While a B was under way, everybody's weight gradients were deferred to its W."""
    layer, other = weight_grad.Linear(IN, IN), weight_grad.Linear(IN, IN)
    x, deferred = torch.randn(TOKENS, IN, requires_grad=True), DeferredGrads()
    found: list[Tensor | None] = []

    def in_a_thread() -> None:
        other(x.detach()).sum().backward()
        found.append(other.weight.grad)

    def in_b(grad: Tensor) -> None:
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()

    y = layer(x)
    y.register_hook(in_b)
    output = y.sum()
    with deferred:
        output.backward()
    assert layer.weight.grad is None
    assert found[0] is not None
    deferred.run()
    assert layer.weight.grad is not None


class Watched(torch.autograd.Function):
    """A fused layer of somebody's, which keeps its input as an attribute."""

    alive: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x * 1.0
        Watched.alive.append(weakref.ref(ctx.kept))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0


def test_w_holds_no_graph() -> None:
    """What a layer kept for W was the input as autograd knew it, and with it every node that had made it. Functions of
    other people that keep tensors as attributes kept them until W."""
    layer = weight_grad.Linear(4, 4)
    deferred = DeferredGrads()
    output = layer(Watched.apply(torch.ones(2, 4, requires_grad=True)))
    with deferred:
        output.sum().backward()
    del output
    assert Watched.alive[0]() is None
    deferred.run()
    assert layer.weight.grad is not None
