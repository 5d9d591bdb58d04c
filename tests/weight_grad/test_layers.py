"""Linear layers, embeddings and experts' weights: split or not, they are torch's, bit for bit."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.one_layer import IN, OUT, TOKENS, assert_same, backward, compare, train
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe import weight_grad
from megapipe.weight_grad import DeferredGrads


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias: bool) -> None:
    """Of any shape, and on transposed inputs."""
    for shape in ((TOKENS, IN), (IN,), (0, IN), (2, 3, IN)):
        compare(nn.Linear(IN, OUT, bias), functools.partial(torch.randn, shape))
    compare(nn.Linear(64, 48, bias), lambda: torch.randn(64, 33).t())
    compare(nn.Linear(64, 48, bias), lambda: torch.randn(33, 5, 64).transpose(0, 1))


class Swapped(nn.Linear):
    """Its output's gradient is strided."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(0, 1)


class DeferringSwapped(Swapped):
    def forward(self, x: Tensor) -> Tensor:
        return weight_grad.linear(x, self.weight, self.bias).transpose(0, 1)


@pytest.mark.parametrize("autocast", [False, True])
def test_linear_with_strided_gradients(autocast: bool) -> None:
    """torch adds the bias apart from the product where the input is strided. The gradient of the bias is then one sum
    over all dimensions, which adds up a strided gradient in another order."""
    weight_grad.let_convert(Swapped, DeferringSwapped)
    for make_input in (lambda: torch.randn(33, 5, 64).transpose(0, 1), lambda: torch.randn(5, 33, 64)):
        compare(Swapped(64, 48), make_input, autocast=autocast)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_strided_input_makes_one_product(autocast: bool) -> None:
    """Of a weight without a gradient, as its cast was, torch makes one for each row of the input."""

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(function.overloadpacket.__name__)
            return function(*args, **(kwargs or {}))

    names: list[str] = []
    layer, x = nn.Linear(64, 48), torch.randn(33, 5, 64).transpose(0, 1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast), Products():
        weight_grad.linear(x, layer.weight, layer.bias)
    assert [name for name in names if "mm" in name] == ["mm"]


class Transposed(nn.Module):
    """As Conv1D of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(IN, OUT)), nn.Parameter(torch.randn(OUT))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], OUT)


class DeferringTransposed(Transposed):
    def forward(self, x: Tensor) -> Tensor:
        return weight_grad.transposed_linear(x, self.weight, self.bias)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(TOKENS, IN), (2, 3, IN)])
def test_transposed_linear(shape: tuple[int, ...], autocast: bool) -> None:
    weight_grad.let_convert(Transposed, DeferringTransposed)
    compare(Transposed(), lambda: torch.randn(shape), autocast=autocast)
    frozen = DeferringTransposed().requires_grad_(False)
    assert torch.equal(frozen(x := torch.randn(shape)), Transposed.forward(frozen, x))


@pytest.mark.parametrize("padding_idx", [None, -1])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (100,)])
def test_embedding(shape: tuple[int, ...], padding_idx: int | None) -> None:
    """With fewer and with more tokens than rows; tokens occur several times."""
    compare(nn.Embedding(20, IN, padding_idx), lambda: torch.randint(20, shape))
    compare(nn.Embedding(50, IN, padding_idx), lambda: torch.randint(5, shape) * 7)


@pytest.mark.parametrize("options", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}])
def test_embeddings_left_to_torch(options: dict[str, Any]) -> None:
    plain = nn.Embedding(20, IN, **options)
    converted = weight_grad.convert(copy.deepcopy(plain))
    tokens = torch.tensor([3, 3, 7])
    for module in (plain, converted):
        backward(module(tokens).sum())
    assert plain.weight.grad.is_sparse == converted.weight.grad.is_sparse
    assert torch.equal(plain.weight.grad.to_dense(), converted.weight.grad.to_dense())


def test_embeddings_of_32_bit_tokens_and_complex_layers() -> None:
    """From the second microbatch on the gradient of an embedding with 32-bit tokens and more rows than tokens was added
    by an operation for 64 bits, which failed. Gradients of complex layers lacked the conjugate and were silently
    wrong."""
    tokens = torch.tensor([1, 7, 7, 0], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.complex64)
    for layer, data in ((torch.nn.Embedding(9, 4), tokens), (torch.nn.Linear(3, 4, dtype=torch.complex64), x)):
        converted = weight_grad.convert(copy.deepcopy(layer))
        for _ in range(2):
            layer(data).abs().square().sum().backward()
            deferred = DeferredGrads()
            with deferred:
                converted(data).abs().square().sum().backward()
            deferred.run()
        for ours, torchs in zip(converted.parameters(), layer.parameters()):
            assert torch.equal(ours.grad, torchs.grad)


class Experts(nn.Module):
    """What GroupedLinear stands for, or GroupedLinear."""

    def __init__(self, counts: list[int], grouped: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = weight_grad.GroupedLinear(len(counts), IN, OUT)
        self.counts, self.grouped = counts, grouped

    def forward(self, x: Tensor) -> Tensor:
        if self.grouped:
            return self.experts(x, torch.tensor(self.counts))
        return torch.cat([F.linear(part, w) for part, w in zip(x.split(self.counts), self.experts.weight)])


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [6], [0, 0]])
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_linear(counts: list[int], autocast: bool) -> None:
    def run(grouped: bool, split: bool) -> dict[str, Tensor | None]:
        return train(Experts(counts, grouped), lambda: torch.randn(sum(counts), IN), 3, split, autocast)

    for split in (True, False):
        assert_same(run(True, split), run(False, False))


def test_grouped_linear_left_to_torch_and_wrong_counts() -> None:
    layer = weight_grad.GroupedLinear(2, IN, OUT)
    x = torch.randn(TOKENS, IN)
    output = layer(x, [2, 4])
    assert torch.equal(weight_grad.grouped_linear(x, layer.weight.detach(), [2, 4]), output)
    assert repr(layer) == f"GroupedLinear(num_experts=2, in_features={IN}, out_features={OUT})"
    for counts in ([2, 3], [2, 2, 2], [7, -1]):
        with pytest.raises(ValueError, match="must share out the 6 rows of x among 2 experts"):
            layer(x, counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(nn.Linear(IN, OUT).to(dtype), lambda: torch.randn(2, 3, IN).to(dtype), autocast=dtype == torch.float64)
    compare(nn.Embedding(20, IN).to(dtype), lambda: torch.randint(20, (9,)))


def test_layers_behind_each_other() -> None:
    """F.linear of three dimensions returns a view, and autograd refuses to change a view that a Function made."""
    compare(nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(inplace=True)), lambda: torch.randn(2, 3, IN))
    compare(nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, OUT)), lambda: torch.randint(20, (9,)), autocast=True)


@pytest.mark.parametrize("kind", [weight_grad.Linear, functools.partial(weight_grad.GroupedLinear, 1)])
def test_autocast_keeps_no_copy_of_a_weight(kind: Callable[..., nn.Module]) -> None:
    """Each microbatch in flight kept one, in half precision."""
    layer, x = kind(IN, OUT), torch.randn(TOKENS, IN, requires_grad=True)
    with torch.autocast("cpu"):
        output = layer(x, [TOKENS]) if isinstance(layer, weight_grad.GroupedLinear) else layer(x)
    assert [tensor.data_ptr() for tensor in output.grad_fn.saved_tensors][1] == layer.weight.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_autocast_does_not_remember_a_weight_without_its_graph() -> None:
    """autocast caches what it casts. A cast made within a Function has no graph, and another user of the weight who was
    given it would contribute nothing to its gradient."""
    layer, x = weight_grad.Linear(IN, IN, bias=False), torch.randn(TOKENS, IN)
    with torch.autocast("cpu"):
        layer(x)
        F.linear(x, layer.weight).sum().backward()
    assert layer.weight.grad is not None


def test_functional_call_and_transforms_are_left_to_torch() -> None:
    layer, x = weight_grad.Linear(IN, OUT), torch.randn(TOKENS, IN)
    parameters = {name: parameter * 2 for name, parameter in layer.named_parameters()}
    backward(torch.func.functional_call(layer, parameters, (x,)).sum())
    torch.testing.assert_close(layer.weight.grad, 2 * x.sum(0).expand(OUT, IN))
    assert torch.func.vmap(layer)(x).shape == (TOKENS, OUT)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), layer(x))


def test_gradients_asked_for_by_name() -> None:
    """`torch.autograd.grad` returns gradients and leaves `.grad` as it is, whatever it passes on its way."""
    layer, x = weight_grad.Linear(IN, OUT), torch.randn(TOKENS, IN, requires_grad=True)
    torch.autograd.grad(layer(x).sum(), [x])
    layer(x).sum().backward(inputs=[x])
    assert layer.weight.grad is None
    (grad,) = torch.autograd.grad(layer(x).sum(), [layer.weight])
    assert layer.weight.grad is None
    layer(x).sum().backward(inputs=[layer.weight])
    assert torch.equal(layer.weight.grad, grad)


def test_there_is_no_second_derivative() -> None:
    """torch.autograd.functional.hessian had zeros, without a word."""
    layer, x = weight_grad.Linear(IN, 1), torch.randn(TOKENS, IN, requires_grad=True)
    for differentiate in (
        lambda: torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True),
        lambda: torch.autograd.functional.hessian(lambda x: layer(x).tanh().sum(), x),
    ):
        with pytest.raises(RuntimeError, match=r"second derivatives .* use torch's own layers there"):
            differentiate()


def test_frozen_weights_keep_no_input() -> None:
    layer = weight_grad.convert(nn.Linear(IN, OUT).requires_grad_(False))
    x = torch.randn(TOKENS, IN, requires_grad=True)
    y = x * 1
    storage = weakref.ref(y)
    output = layer(y)
    del y
    assert storage() is None
    backward(output.sum())
    assert layer.weight.grad is None
    assert x.grad is not None
