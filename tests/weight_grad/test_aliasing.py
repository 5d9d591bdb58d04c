"""Gradients that several hold: none changes another's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.one_layer import IN, OUT, TOKENS, Scale, backward
from torch import Tensor, nn

from megapipe import weight_grad
from megapipe.weight_grad import AT_ONCE, DeferredGrads


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_gradient_shared_by_two_parameters(expand: bool, split: bool) -> None:
    """Others add the second microbatch's to the first's in place, and with it to the other parameter's."""
    a, b = (torch.ones(IN, requires_grad=True) for _ in range(2))
    before = Scale.num_backwards
    for _ in range(3):
        x = torch.arange(IN, dtype=torch.float32)
        backward(Scale.apply(x, a, b, expand).sum(), split=split)
    assert Scale.num_backwards == before + 3
    want = 3 * (x.sum().expand(IN) if expand else x)
    assert torch.equal(a.grad, want)
    assert torch.equal(b.grad, want)


@pytest.mark.parametrize("shape", [(2, 3, OUT), (6 * OUT,), (1, 2, 3, OUT)])
def test_output_gradients_that_others_go_on_using(shape: tuple[int, ...]) -> None:
    """Autograd makes the tensor that the layer keeps until W, or a view of it, the gradient of `bias`, and the next B
    adds to it in place."""
    x = [torch.randn(2, 3, IN) for _ in range(2)]

    def run(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        layer, other = (weight_grad.Linear(IN, OUT, bias=False) for _ in range(2))
        bias = torch.zeros(shape, requires_grad=True)
        deferred = [DeferredGrads() if split else None for _ in x]
        for microbatch, deferred_here in zip(x, deferred):
            with deferred_here or AT_ONCE:
                (
                    (bias.view(2, 3, OUT) + layer(microbatch) + other(microbatch.view(6, IN)).view(2, 3, OUT)) * 2
                ).sum().backward()
        for deferred_here in deferred:
            if deferred_here is not None:
                deferred_here.run()
        return [layer.weight.grad, other.weight.grad, bias.grad]

    for got, want in zip(run(True), run(False)):
        assert torch.equal(got, want)


def test_output_gradients_are_not_copied_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = nn.LayerNorm(IN), nn.Linear(IN, 3 * IN), nn.Linear(IN, IN)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(self.norm(x)).view(2, 3, 2, -1).transpose(1, 2).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, IN))

    model = weight_grad.convert(nn.Sequential(nn.Embedding(11, IN), Attention(), Attention(), nn.Linear(IN, 11)))
    loss = F.cross_entropy(model(torch.randint(11, (2, 3))).flatten(0, 1), torch.randint(11, (6,)))
    copies: list[Tensor] = []
    monkeypatch.setattr(Tensor, "clone", lambda tensor: copies.append(tensor) or tensor)
    backward(loss)
    assert not copies


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (weight_grad.Linear(IN, OUT), (torch.randn(TOKENS, IN),)),
        (weight_grad.Embedding(20, IN), (torch.randint(20, (TOKENS,)),)),
        (weight_grad.GroupedLinear(3, IN, OUT), (torch.randn(6, IN), [1, 2, 3])),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("num_before", [0, 1])
def test_an_input_changed_between_b_and_w(layer: nn.Module, arguments: tuple[Any, ...], num_before: int) -> None:
    """Autograd no longer watches it then."""
    for _ in range(num_before):  # then there is a gradient to add to
        backward(layer(*arguments).sum())
    deferred = DeferredGrads()
    with deferred:
        layer(*arguments).sum().backward()
    arguments[0].zero_()
    with pytest.raises(RuntimeError, match="was changed in place between its B and its W"):
        deferred.run()
