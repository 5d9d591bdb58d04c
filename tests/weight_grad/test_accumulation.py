"""What W adds to a gradient, and in which order: torch's; and to no other's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.one_layer import IN, OUT, TOKENS, Scale, assert_same, backward, compare, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megapipe import weight_grad
from megapipe.weight_grad import AT_ONCE, DeferredGrads


@pytest.mark.parametrize("num_tokens", [1, 600])
def test_accumulated_gradients_are_torchs(num_tokens: int) -> None:
    """Products were added to gradients in one go, by a BLAS that rounds as it sees fit: with one token or with many,
    and on some processors with any number, sums over microbatches differed from torch's in the last bits."""
    compare(nn.Linear(70, 90), lambda: torch.randn(num_tokens, 70))
    model = nn.Sequential(nn.Embedding(11, IN), nn.Linear(IN, OUT), nn.GELU())
    compare(model, lambda: torch.randint(11, (num_tokens,)))


class Shared(nn.Module):
    """One weight in an embedding, three layers and a head. One of the ends may be plain torch, which does not defer:
    then there are no layers."""

    def __init__(self, plain: str = "", use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(IN, IN)
        self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(0 if plain else 3))
        self.head = nn.Linear(IN, IN, bias=False)
        for layer in (*self.layers, self.head):
            layer.weight = self.embedding.weight
        for layer in self.layers[1:]:
            layer.bias = self.layers[0].bias
        self.plain, self.use_reentrant = plain, use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embedding.weight
        x = F.embedding(tokens, weight) if self.plain == "embedding" else self.embedding(tokens)
        if self.use_reentrant is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return F.linear(x, weight) if self.plain == "head" else self.head(x)


@pytest.mark.parametrize(
    ("plain", "use_reentrant"), [("", None), ("", False), ("", True), ("embedding", None), ("head", None)]
)
def test_a_weight_used_several_times(plain: str, use_reentrant: bool | None) -> None:
    """Each product was added to the gradient by itself, where autograd adds up those of a backward first. What autograd
    added in B went to the gradient before what W added."""
    compare(Shared(plain, use_reentrant), lambda: torch.randint(IN, (5, 7)))


def test_elsewhere_products_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, which is close to torch's. In float64, where it is close on every processor."""
    monkeypatch.setattr(Tensor, "is_cpu", False)
    plain = Shared().double()
    at_once, split = (weight_grad.convert(copy.deepcopy(plain)) for _ in range(2))
    make_input = lambda: torch.randint(IN, (5, 7))  # noqa: E731
    want = train(plain, make_input, 3, False)
    torch.testing.assert_close(train(split, make_input, 3, True), want)
    torch.testing.assert_close(train(at_once, make_input, 3, False), want)


def test_main_grad() -> None:
    model = nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, OUT)).bfloat16()
    at_once, split, plain = weight_grad.convert(copy.deepcopy(model)), weight_grad.convert(model), copy.deepcopy(model)
    for module in (split, at_once):
        for parameter in module.parameters():
            parameter.main_grad = torch.ones_like(parameter, dtype=torch.float32)
    for module, is_split in ((plain, False), (split, True), (at_once, False)):
        train(module, lambda: torch.randint(20, (4,)), 1, is_split)
    for name, parameter in split.named_parameters():
        if name.endswith("weight"):
            assert parameter.grad is None
            assert parameter.grad_added_to_main_grad
            assert torch.equal(parameter.main_grad, at_once.get_parameter(name).main_grad)
            assert torch.equal(parameter.main_grad, 1 + plain.get_parameter(name).grad.float())


@pytest.mark.parametrize("split", [False, True])
def test_hooks_that_add_to_main_grad_by_themselves(split: bool) -> None:
    """They found no gradient in W, since it had been added already."""
    plain = nn.Linear(IN, OUT, dtype=torch.bfloat16)
    converted = weight_grad.convert(copy.deepcopy(plain))

    def add(parameter: Tensor) -> None:
        parameter.main_grad += parameter.grad.float()
        parameter.grad = None

    for module in (plain, converted):
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.register_post_accumulate_grad_hook(add)
    for _ in range(3):
        x = torch.randn(TOKENS, IN, dtype=torch.bfloat16)
        backward(plain(x).sum(), split=False)
        backward(converted(x).sum(), split=split)
    for name, parameter in converted.named_parameters():
        assert torch.equal(parameter.main_grad, plain.get_parameter(name).main_grad)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_of_another_dtype_than_their_weights(dtype: torch.dtype | None) -> None:
    """The dtype that the owner had chosen for the gradient was ignored, and autograd refused the first one in W."""
    plain = nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, IN)).to(torch.bfloat16)
    plain[1].weight = plain[0].weight = nn.Parameter(plain[0].weight[:IN].detach().clone())
    converted = weight_grad.convert(copy.deepcopy(plain))
    make_input = lambda: torch.randint(IN, (5, 1))  # noqa: E731
    for module in (plain, converted):
        for parameter in module.parameters():
            parameter.grad_dtype = dtype
    want = train(plain, make_input, 3, False)
    assert_same(train(converted, make_input, 3, True), want)
    converted.zero_grad()
    assert_same(train(converted, make_input, 3, False), want)


class Largest(TorchDispatchMode):
    """The most elements of a tensor that is made meanwhile."""

    num_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, Tensor)}
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.num_elements = max(self.num_elements, result.numel())
        return result


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (weight_grad.Linear(64, 48, bias=False), (torch.randn(2, 3, 64),)),
        (weight_grad.Embedding(500, 8), (torch.randint(500, (2, 3)),)),
        (weight_grad.GroupedLinear(3, 64, 48), (torch.randn(6, 64), [1, 2, 3])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_nothing_as_large_as_the_weight_is_made_to_accumulate(
    layer: nn.Module, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On accelerators; and on CPU for an embedding, whose rows can be added exactly."""
    if not isinstance(layer, nn.Embedding):
        monkeypatch.setattr(Tensor, "is_cpu", False)
    backward(layer(*arguments).sum())
    deferred = DeferredGrads()
    with deferred:
        layer(*arguments).sum().backward()
    with Largest() as largest:
        deferred.run()
    assert largest.num_elements <= 2 * 3 * 64


# Gradients that several hold: none changes another's


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
