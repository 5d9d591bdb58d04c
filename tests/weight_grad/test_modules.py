"""Whole models whose layers are converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.one_layer import IN, OUT, TOKENS, assert_same, backward, train
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from megapipe import weight_grad
from megapipe.weight_grad import DeferredGrads


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        self.use_reentrant, self.num_runs = use_reentrant, 0

    def inner(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return x + self.down(F.gelu(self.up(x)))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Model(nn.Module):
    """A tied embedding and head, and a block between."""

    def __init__(self, use_reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.block = nn.Embedding(11, IN), Block(use_reentrant)
        self.head = nn.Linear(IN, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embedding(tokens)))


def tokens() -> Tensor:
    return torch.randint(11, (5, 2))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_recomputed_once_and_in_b(use_reentrant: bool) -> None:
    model, deferred = weight_grad.convert(Model(use_reentrant)), DeferredGrads()
    output = model(tokens())
    assert model.block.num_runs == 1
    with deferred:
        output.sum().backward()
    assert model.block.num_runs == 2
    assert model.block.up.weight.grad is None
    deferred.run()
    assert model.block.num_runs == 2
    assert model.block.up.weight.grad is not None


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_computed_from_others_are_left_to_autograd(normalize: Callable[[nn.Module], nn.Module]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(IN, OUT), normalize(nn.Linear(OUT, IN)))

    make_input = lambda: torch.randn(TOKENS, IN)  # noqa: E731
    assert_same(train(weight_grad.convert(model()), make_input, 1, True), train(model(), make_input, 1, False))


def test_convert_changes_nothing_else() -> None:
    model = Model()
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    state, text, layer = model.state_dict(), repr(model), model.block.up
    calls: list[Any] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    assert weight_grad.convert(weight_grad.convert(model)) is model
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.state_dict().keys() == state.keys()
    assert repr(model) == text
    assert model.block.up is layer
    assert type(layer) is weight_grad.Linear
    model(tokens())
    assert calls == [1]
    model.load_state_dict(Model().state_dict())
    assert type(weight_grad.convert(nn.Linear(2, 2))) is weight_grad.Linear


def test_convert_leaves_subclasses_alone() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * 2

    assert type(weight_grad.convert(Doubled(2, 2))) is Doubled
    attention = nn.MultiheadAttention(IN, 2)
    kind = type(attention.out_proj)
    assert type(weight_grad.convert(attention).out_proj) is kind
    x = torch.randn(3, 2, IN)
    backward(attention(x, x, x)[0].sum())
    assert attention.out_proj.weight.grad is not None
