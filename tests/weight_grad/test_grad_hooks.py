"""Hooks of weights whose gradients come in W."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.models import assert_same_gradients, build, reference, run
from tools.one_layer import IN, TOKENS, Scale, backward
from tools.ranks import on_ranks
from torch import Tensor, nn

from megapipe import weight_grad


class Both(nn.Module):
    """A weight used twice by deferring layers and, where `plainly`, once by torch."""

    def __init__(self, plainly: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(IN, IN, bias=False)
        self.plainly = plainly

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x))
        return F.linear(x, self.layer.weight) if self.plainly else x


@pytest.mark.parametrize("plainly", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_post_accumulate_hooks_are_called_once_per_microbatch(split: bool, plainly: bool) -> None:
    model, plain = weight_grad.convert(Both(plainly)), Both(plainly)
    seen: list[Tensor] = []
    model.layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
    want: list[Tensor] = []
    plain.layer.weight.register_post_accumulate_grad_hook(lambda weight: want.append(weight.grad.clone()))
    for _ in range(3):
        x = torch.randn(TOKENS, IN)
        backward(plain(x).sum(), split=False)
        backward(model(x).sum(), split=split)
    torch.testing.assert_close(seen, want)


def test_functions_of_users_do_not_defer_what_tensor_hooks_must_see() -> None:
    a, b = (torch.ones(IN, requires_grad=True) for _ in range(2))
    a.register_hook(lambda grad: grad * 2)
    with pytest.raises(TypeError, match=r"weight of shape \[8\] with tensor hooks .* return the gradient"):
        backward(Scale.apply(torch.ones(IN), a, b, False).sum(), split=True)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("backward failed")


def test_a_failing_backward_gives_the_hooks_back_and_keeps_nothing() -> None:
    layer, calls = weight_grad.Linear(IN, IN), []
    layer.weight.register_post_accumulate_grad_hook(calls.append)
    for split in (True, False):
        x = torch.randn(TOKENS, IN, requires_grad=True)
        with pytest.raises(ArithmeticError):
            backward(layer(Fails.apply(x)).sum(), split=split)
        calls.clear()
        backward(layer(x).sum(), split=split)
        assert len(calls) == 1
    weight = weakref.ref(layer.weight)
    del layer, x
    calls.clear()
    gc.collect()
    assert weight() is None


# In a schedule


@on_ranks(2)
def test_a_hook_that_insists_on_a_gradient_finds_one(rank: int) -> None:
    """Megatron's hooks, with reductions that overlap, fail where they find no gradient when autograd has passed by. So
    every step of a model whose weight gradients are put off, or added to `main_grad` at once, ended there."""
    for schedule in ("1f1b", "zb1p", "zbv"):
        chunks = build(schedule, 2, 4, deferred=True, no_sync_func=contextlib.nullcontext)
        nodes = []
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False

            def hook(*grads: object, parameter: torch.nn.Parameter = parameter) -> None:
                assert parameter.grad is not None
                if not parameter.grad_added_to_main_grad:
                    parameter.main_grad += parameter.grad
                parameter.grad = None

            nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(hook)
        run(schedule, chunks, 3)
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            assert parameter.grad is None
            parameter.grad = parameter.main_grad
        assert_same_gradients(chunks, reference(4, 3)[0], schedule)
