"""Deferred weight gradients: computed in W or at once, they are torch's."""

from __future__ import annotations

import copy
import functools
import gc
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megapipe import weight_grad
from megapipe.weight_grad import DeferredGrads, SavedTensor, deferring, products

TOKENS, IN, OUT = 6, 8, 12


def backward(output: Tensor, grad: Tensor | None = None, split: bool = True) -> None:
    """B and W."""
    if not split:
        output.backward(grad)
        return
    deferred = DeferredGrads()
    with deferring(deferred):
        output.backward(grad)
    deferred.run()


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        if tensor is None:
            assert got[name] is None, name
        else:
            assert got[name] is not None, name
            assert got[name].dtype == tensor.dtype, name
            assert torch.equal(got[name], tensor), f"{name}: {(got[name] - tensor).abs().max()}"


def train(
    module: nn.Module, make_input: Callable[[], Tensor], num_microbatches: int, split: bool, autocast: bool = False
) -> dict[str, Tensor | None]:
    """Outputs, input gradients and parameter gradients after some microbatches."""
    results = {}
    for microbatch in range(num_microbatches):
        torch.manual_seed(microbatch)
        x = make_input()
        if x.is_floating_point():
            x.requires_grad_()
        with torch.autocast("cpu", enabled=autocast):
            output = module(x)
        torch.manual_seed(100 + microbatch)
        backward(output, torch.randn(output.shape).to(output.dtype), split)
        results[f"output {microbatch}"], results[f"input {microbatch}"] = output.detach(), x.grad
    return {**results, **gradients(module)}


def compare(plain: nn.Module, make_input: Callable[[], Tensor], **options: Any) -> None:
    """One microbatch, and three, split and unsplit: as torch's layers have it, bit for bit."""
    at_once, split = (weight_grad.convert(copy.deepcopy(plain)) for _ in range(2))
    assert any(type(a) is not type(b) for a, b in zip(plain.modules(), split.modules()))
    for num_microbatches in (1, 3):
        for module in (plain, at_once, split):
            module.zero_grad()
        want = train(plain, make_input, num_microbatches, False, **options)
        assert_same(train(at_once, make_input, num_microbatches, False, **options), want)
        assert_same(train(split, make_input, num_microbatches, True, **options), want)


# Layers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(TOKENS, IN), (IN,), (0, IN), (2, 0, IN), (2, 3, IN), (2, 3, 2, IN)])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    compare(nn.Linear(IN, OUT, bias), lambda: torch.randn(shape))


@pytest.mark.parametrize("bias", [True, False])
def test_linear_on_transposed_inputs(bias: bool) -> None:
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


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
@pytest.mark.parametrize("shape", [(), (0,), (9,), (3, 4), (100,)])
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


CONVOLUTIONS = [
    {},
    {"stride": 2, "padding": 1},
    {"padding": "same"},
    {"padding": "valid"},
    {"padding": "same", "dilation": 3},
    {"groups": 2, "dilation": 2},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "reflect"},
]


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [3, 4])
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options: dict[str, Any], kernel: int) -> None:
    compare(nn.Conv1d(4, 6, kernel, bias=False, **options), lambda: torch.randn(2, 4, 13))
    compare(nn.Conv2d(4, 6, (kernel, 3), bias=False, **options), lambda: torch.randn(2, 4, 13, 9))
    compare(nn.Conv1d(4, 6, kernel, **options), lambda: torch.randn(2, 4, 13))
    compare(nn.Conv2d(4, 6, kernel, **options), lambda: torch.randn(4, 13, 9))


def test_convolution_without_a_batch_and_in_channels_last() -> None:
    compare(nn.Conv1d(4, 6, 3, bias=False), lambda: torch.randn(4, 9))
    compare(nn.Conv2d(4, 6, 3, bias=False), lambda: torch.randn(0, 4, 9, 9))
    layer = nn.Conv2d(16, 8, 3, bias=False).to(memory_format=torch.channels_last)
    compare(layer, lambda: torch.randn(2, 16, 9, 9).to(memory_format=torch.channels_last))


def test_convolution_functions_take_what_torchs_take() -> None:
    x, weight = torch.randn(2, 4, 9, 9), torch.randn(6, 4, 3, 3, requires_grad=True)
    assert torch.equal(weight_grad.conv2d(x, weight, None, (2,), (1,), [1]), F.conv2d(x, weight, None, (2,), (1,), [1]))
    with pytest.raises(ValueError, match='padding "same" needs stride 1, got'):
        weight_grad.conv2d(x, weight, stride=2, padding="same")
    with pytest.raises(ValueError, match='must be "same", "valid", or numbers, got "smae"'):
        weight_grad.conv2d(x, weight, padding="smae")


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


@pytest.mark.parametrize("counts", [[3, 0, 2, 1], [6], [0, 6, 0], [0, 0]])
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_linear(counts: list[int], autocast: bool) -> None:
    def run(grouped: bool, num_microbatches: int, split: bool) -> dict[str, Tensor | None]:
        make = Experts(counts, grouped)
        return train(make, lambda: torch.randn(sum(counts), IN), num_microbatches, split, autocast)

    for num_microbatches in (1, 3):
        assert_same(run(True, num_microbatches, True), run(False, num_microbatches, False))
        assert_same(run(True, num_microbatches, False), run(False, num_microbatches, False))


def test_grouped_linear_left_to_torch_and_wrong_counts() -> None:
    layer = weight_grad.GroupedLinear(2, IN, OUT)
    x = torch.randn(TOKENS, IN)
    output = layer(x, [2, 4])
    assert torch.equal(weight_grad.grouped_linear(x, layer.weight.detach(), [2, 4]), output)
    assert repr(layer) == f"GroupedLinear(num_experts=2, in_features={IN}, out_features={OUT})"
    for counts in ([2, 3], [2, 2, 2], [7, -1]):
        with pytest.raises(ValueError, match="must share out the 6 rows of x among 2 experts"):
            layer(x, counts)


@pytest.mark.parametrize("num_tokens", [1, 7, 600])
def test_accumulated_gradients_are_torchs(num_tokens: int) -> None:
    """Products were added to gradients in one go, by a BLAS that rounds as it sees fit: with one token or with many,
    and on some processors with any number, sums over microbatches differed from torch's in the last bits."""
    compare(nn.Linear(70, 90), lambda: torch.randn(num_tokens, 70))
    model = nn.Sequential(nn.Embedding(11, IN), nn.Linear(IN, OUT), nn.GELU())
    compare(model, lambda: torch.randint(11, (num_tokens,)))


class Shared(nn.Module):
    """One weight in an embedding, three layers and a head, of which some may be plain torch: they do not defer."""

    def __init__(self, plain: tuple[str, ...], use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(IN, IN)
        self.layers = nn.ModuleList(nn.Linear(IN, IN) for _ in range(3))
        self.head = nn.Linear(IN, IN, bias=False)
        self.convolution = nn.Conv1d(IN, IN, 1)
        for layer in (*self.layers, self.head):
            layer.weight = self.embedding.weight
        for layer in (*self.layers[1:], self.convolution):
            layer.bias = self.layers[0].bias
        self.plain, self.use_reentrant = plain, use_reentrant

    def inner(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(F.linear(x, layer.weight, layer.bias) if "layers" in self.plain else layer(x))
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embedding.weight
        x = F.embedding(tokens, weight) if "embedding" in self.plain else self.embedding(tokens)
        x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
        if self.use_reentrant is None:
            x = self.inner(x)
        else:
            x = checkpoint(self.inner, x, use_reentrant=self.use_reentrant)
        return F.linear(x, weight) if "head" in self.plain else self.head(x)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_weight_used_several_times(use_reentrant: bool | None) -> None:
    """Each product was added to the gradient by itself, where autograd adds up those of a backward first."""
    compare(Shared((), use_reentrant), lambda: torch.randint(IN, (5, 7)))


@pytest.mark.parametrize("plain", ["embedding", "head"])
def test_a_weight_used_by_a_layer_that_defers_and_by_plain_torch(plain: str) -> None:
    """What autograd added in B went to the gradient before what W added, and each by itself."""
    model = Shared((plain,))
    del model.layers[:]
    compare(model, lambda: torch.randint(IN, (5, 7)))


def test_elsewhere_products_are_added_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, which is close to torch's. In float64, where it is close on every processor."""
    monkeypatch.setattr(Tensor, "is_cpu", False)
    plain = Shared(()).double()
    at_once, split = (weight_grad.convert(copy.deepcopy(plain)) for _ in range(2))
    make_input = lambda: torch.randint(IN, (5, 7))  # noqa: E731
    want = train(plain, make_input, 3, False)
    torch.testing.assert_close(train(split, make_input, 3, True), want)
    torch.testing.assert_close(train(at_once, make_input, 3, False), want)


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    compare(nn.Linear(IN, OUT).to(dtype), lambda: torch.randn(2, 3, IN).to(dtype))
    compare(nn.Embedding(20, IN).to(dtype), lambda: torch.randint(20, (9,)))


def test_autocast() -> None:
    compare(nn.Linear(IN, OUT), lambda: torch.randn(2, 3, IN), autocast=True)
    compare(nn.Linear(IN, OUT).double(), lambda: torch.randn(2, 3, IN).double(), autocast=True)
    compare(nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, OUT)), lambda: torch.randint(20, (9,)), autocast=True)
    compare(nn.Conv1d(4, 6, 3, bias=False), lambda: torch.randn(2, 4, 9), autocast=True)
    compare(nn.Conv2d(4, 6, 3, bias=False), lambda: torch.randn(2, 4, 9, 9), autocast=True)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_main_grad(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, OUT), nn.Unflatten(0, (1, 4)), nn.Conv1d(4, 4, 3)).to(
        dtype
    )
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
    plain = nn.Sequential(nn.Embedding(20, IN), nn.Linear(IN, IN), nn.Conv1d(1, 2, 3)).to(torch.bfloat16)
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


class Apex(types.ModuleType):
    """The kernels' C++ signature: (input, d_output, d_weight); 2-D, contiguous, adds to d_weight."""

    def __init__(self) -> None:
        super().__init__("fused_weight_gradient_mlp_cuda")
        self.calls: list[str] = []

    def wgrad_gemm_accum_fp32(self, input: Tensor, d_output: Tensor, d_weight: Tensor, /) -> None:
        assert d_weight.dtype == torch.float32
        self._add("fp32", input, d_output, d_weight)

    def wgrad_gemm_accum_fp16(self, input: Tensor, d_output: Tensor, d_weight: Tensor, /) -> None:
        assert d_weight.dtype == input.dtype
        self._add("fp16", input, d_output, d_weight)

    def _add(self, name: str, input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
        assert input.dim() == d_output.dim() == d_weight.dim() == 2
        assert input.is_contiguous()
        assert d_output.is_contiguous()
        assert d_weight.is_contiguous()
        assert input.dtype == d_output.dtype
        assert (d_output.shape[1], input.shape[1]) == d_weight.shape
        d_weight += d_output.t().float() @ input.float()
        self.calls.append(name)


@pytest.fixture
def apex(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in, with tensors that say they are on CUDA."""
    module = Apex()
    monkeypatch.setitem(sys.modules, "fused_weight_gradient_mlp_cuda", module)
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(Tensor, "is_cpu", False)
    products._apex_function.cache_clear()
    yield module
    products._apex_function.cache_clear()


@pytest.mark.parametrize(("main_grad", "kernel"), [(torch.float32, "fp32"), (torch.bfloat16, "fp16")])
def test_apex_is_called_as_it_wants(apex: Apex, main_grad: torch.dtype, kernel: str) -> None:
    layer = weight_grad.Linear(IN, OUT, bias=False, dtype=torch.bfloat16)
    experts = weight_grad.GroupedLinear(2, IN, OUT, dtype=torch.bfloat16)
    for module in (layer, experts):
        module.weight.main_grad = torch.zeros_like(module.weight, dtype=main_grad)
    x = torch.randn(3, 2, IN, dtype=torch.bfloat16)
    output = layer(x.transpose(0, 1))
    grad = torch.randn(3, 2, OUT, dtype=torch.bfloat16).transpose(0, 1)
    backward(output, grad)
    assert apex.calls == [kernel]
    want = grad.flatten(0, 1).t().float() @ x.transpose(0, 1).flatten(0, 1).float()
    torch.testing.assert_close(layer.weight.main_grad.float(), want, atol=2e-2, rtol=2e-2)
    backward(experts(x.flatten(0, 1), [2, 4]).sum())
    assert apex.calls == [kernel] * 3


def test_real_apex() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    pytest.importorskip("fused_weight_gradient_mlp_cuda", reason="needs apex")
    layer = weight_grad.Linear(64, 48, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    x = torch.randn(5, 32, 64, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(5, 32, 48, device="cuda", dtype=torch.bfloat16)
    assert products._apex_function(torch.float32) is not None
    backward(layer(x), grad)
    want = grad.flatten(0, 1).t().float() @ x.flatten(0, 1).float()
    torch.testing.assert_close(layer.weight.main_grad, want, atol=1e-2, rtol=1e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_layers_on_cuda() -> None:
    """Autograd runs backward in a thread of its own there, which must find the list of deferred gradients."""
    layer = weight_grad.Linear(64, 48, bias=False, device="cuda", dtype=torch.bfloat16)
    layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    x = torch.randn(5, 32, 64, device="cuda", dtype=torch.bfloat16)
    deferred = DeferredGrads()
    with deferring(deferred):
        layer(x).sum().backward()
    assert not layer.weight.main_grad.any()
    deferred.run()
    want = x.flatten(0, 1).float().sum(0).expand(48, 64)
    torch.testing.assert_close(layer.weight.main_grad, want, atol=1e-2, rtol=1e-2)


# Whole models


class Block(nn.Module):
    """Counts how often it runs."""

    def __init__(self, use_reentrant: bool | None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(IN, OUT), nn.Linear(OUT, IN)
        self.dropout = nn.Dropout(0.3)
        self.use_reentrant = use_reentrant
        self.num_runs = 0

    def inner(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        return x + self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant is None:
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Model(nn.Module):
    """A tied embedding and head, a block, a layer used twice, a frozen one, and one that is never used."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, IN)
        self.block = Block(use_reentrant)
        self.twice = nn.Linear(IN, IN)
        self.frozen = nn.Linear(IN, IN).requires_grad_(False)
        self.unused = nn.Linear(IN, IN)
        self.head = nn.Linear(IN, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.frozen(self.block(self.embedding(tokens)))
        return self.head(self.twice(F.relu(self.twice(x), inplace=True)))


def tokens() -> Tensor:
    return torch.randint(11, (5, 2))


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_model(use_reentrant: bool | None) -> None:
    plain, at_once, split = (
        Model(),
        weight_grad.convert(Model(use_reentrant)),
        weight_grad.convert(Model(use_reentrant)),
    )
    want = train(plain, tokens, 1, False)
    assert_same(train(at_once, tokens, 1, False), train(split, tokens, 1, True))
    torch.testing.assert_close(gradients(split), {k: v for k, v in want.items() if k[0] != "o" and k[0] != "i"})
    assert split.unused.weight.grad is None
    assert split.frozen.weight.grad is None
    assert_same(train(at_once, tokens, 2, False), train(split, tokens, 2, True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_are_recomputed_once_and_in_b(use_reentrant: bool) -> None:
    model, deferred = weight_grad.convert(Model(use_reentrant)), DeferredGrads()
    output = model(tokens())
    assert model.block.num_runs == 1
    with deferring(deferred):
        output.sum().backward()
    assert model.block.num_runs == 2
    assert model.block.up.weight.grad is None
    deferred.run()
    assert model.block.num_runs == 2
    assert model.block.up.weight.grad is not None


def test_inplace_activations_may_follow() -> None:
    """F.linear of three dimensions returns a view, and autograd refuses to change a view that a Function made."""
    compare(nn.Sequential(nn.Linear(IN, OUT), nn.ReLU(inplace=True)), lambda: torch.randn(2, 3, IN))
    compare(nn.Sequential(nn.Conv1d(4, 6, 3, bias=False), nn.ReLU(inplace=True)), lambda: torch.randn(4, 9))


@pytest.mark.parametrize("normalize", [parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weights_computed_from_others_are_left_to_autograd(normalize: Callable[[nn.Module], nn.Module]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(IN, OUT), normalize(nn.Linear(OUT, IN)))

    make_input = lambda: torch.randn(TOKENS, IN)  # noqa: E731
    assert_same(train(weight_grad.convert(model()), make_input, 1, True), train(model(), make_input, 1, False))


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
    layer, x = weight_grad.Linear(IN, 1), torch.randn(TOKENS, IN, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)
    with pytest.raises(RuntimeError):
        grad.sum().backward()


# Functions of users


class Scale(torch.autograd.Function):
    """y = x * a * b, elementwise; a and b receive the same gradient tensor, or views of one number."""

    num_backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, expand: bool) -> Tensor:
        ctx.a, ctx.b, ctx.expand = a, b, expand
        ctx.save_for_backward(x)
        return x * a * b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        Scale.num_backwards += 1
        (x,) = ctx.saved_tensors
        shared = (grad * x).sum().expand(x.shape) if ctx.expand else grad * x
        weight_grad.defer(ctx.a, lambda: shared)
        weight_grad.defer(ctx.b, lambda: shared)
        return grad, None, None, None


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
            with deferring(deferred_here):
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
    ("shape", "use"),
    [
        ((OUT, IN), weight_grad.linear),
        ((OUT,), lambda x, leaf: weight_grad.conv1d(x.T, nn.Parameter(torch.ones(OUT, IN, 1)), leaf)),
        ((TOKENS, IN), lambda x, leaf: Scale.apply(x, leaf, nn.Parameter(torch.ones(TOKENS, IN)), False)),
    ],
    ids=["weight", "bias", "function"],
)
def test_only_gradients_of_parameters_are_deferred(shape: tuple[int, ...], use: Callable[..., Tensor]) -> None:
    """What a stage has received, or an earlier slice has kept, may be a layer's weight: a leaf whose gradient travels
    on when B ends. It was left to W, and what the leaf was made from got none of it."""
    x, leaves = torch.randn(TOKENS, IN), [torch.ones(shape, requires_grad=True) for _ in range(2)]
    for leaf, deferred in zip(leaves, (DeferredGrads(), None)):
        with deferring(deferred):
            use(x, leaf).square().sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_defer_refuses_what_keeps_no_gradient() -> None:
    with pytest.raises(TypeError, match=r"shape \[2\] that was computed from others"):
        weight_grad.defer(torch.ones(2, requires_grad=True) * 2, lambda: torch.ones(2))


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


# Hooks


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


@pytest.mark.parametrize("split", [False, True])
def test_tensor_hooks_see_the_gradient_of_a_microbatch(split: bool) -> None:
    """autograd would call them with None, where the gradient is still to come."""
    model, plain = weight_grad.convert(Both(True)), Both(True)
    for module in (model, plain):
        module.layer.weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))
    for _ in range(2):
        x = torch.randn(TOKENS, IN)
        backward(plain(x).sum(), split=False)
        backward(model(x).sum(), split=split)
    assert torch.equal(model.layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.parametrize("split", [False, True])
def test_tensor_hooks_with_functions_of_users(split: bool) -> None:
    a, b = (torch.ones(IN, requires_grad=True) for _ in range(2))
    a.register_hook(lambda grad: grad * 2)
    backward(Scale.apply(torch.ones(IN), a, b, False).sum(), split=split)
    assert torch.equal(a.grad, 2 * b.grad)


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


# Between B and W


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
    with deferring(deferred):
        layer(*arguments).sum().backward()
    with Largest() as largest:
        deferred.run()
    assert largest.num_elements <= 2 * 3 * 64


def test_only_inputs_and_output_gradients_are_held_between_b_and_w() -> None:
    model = weight_grad.convert(nn.Sequential(nn.Linear(IN, OUT), nn.LayerNorm(OUT), nn.GELU(), nn.Linear(OUT, IN)))
    kept: dict[str, weakref.ref[Any]] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            kept[name] = weakref.ref(output.untyped_storage())

        return hook

    for name, layer in model.named_children():
        layer.register_forward_hook(keep(name))
    held: list[Any] = []
    hold = DeferredGrads.add

    def watch(self: DeferredGrads, weight: Tensor, compute: Any, add_to: Any = None) -> None:
        held.extend(part.get() for part in compute.args if isinstance(part, SavedTensor))
        hold(self, weight, compute, add_to)

    deferred = DeferredGrads()
    x = torch.randn(TOKENS, IN)
    loss = model(x).square().sum()
    with pytest.MonkeyPatch.context() as patch, deferring(deferred):
        patch.setattr(DeferredGrads, "add", watch)
        loss.backward()
    assert sorted(tuple(tensor.shape) for tensor in held) == sorted([(TOKENS, OUT)] * 2 + [(TOKENS, IN)] * 2)
    held.clear()
    del loss
    gc.collect()
    alive = {name for name, reference in kept.items() if reference() is not None}
    assert alive == {"2"}  # the GELU's output, which the last layer needs
    deferred.run()
    gc.collect()
    assert kept["2"]() is None


@pytest.mark.parametrize(
    ("layer", "arguments"),
    [
        (weight_grad.Linear(IN, OUT), (torch.randn(TOKENS, IN),)),
        (weight_grad.Embedding(20, IN), (torch.randint(20, (TOKENS,)),)),
        (weight_grad.Conv1d(IN, OUT, 3), (torch.randn(2, IN, 9),)),
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
    with deferring(deferred):
        layer(*arguments).sum().backward()
    arguments[0].zero_()
    with pytest.raises(RuntimeError, match="was changed in place between its B and its W"):
        deferred.run()


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_backward_that_is_run_within_b_defers_nothing(use_reentrant: bool) -> None:
    """Whoever runs one in a Function's backward, as implicit layers do, goes on with its gradients. These were deferred
    to the W of the B that was under way."""

    def run(split: bool) -> list[Tensor]:
        torch.manual_seed(0)
        outer, inner = weight_grad.Linear(IN, IN), weight_grad.Linear(IN, IN)
        seen: list[Tensor] = []
        for layer in (outer, inner):
            layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.clone()))
        for _ in range(2):
            backward(Solves.apply(outer(torch.randn(TOKENS, IN)), inner, use_reentrant).sum(), split=split)
        return [outer.weight.grad, inner.weight.grad, *seen[-2:]]

    for got, want in zip(run(True), run(False)):
        assert torch.equal(got, want)


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
    with deferring(deferred):
        output.backward()
    assert layer.weight.grad is None
    assert found[0] is not None
    deferred.run()
    assert layer.weight.grad is not None


def test_threads_do_not_mix() -> None:
    """Two pipelines in one process: each finds its own gradients in its W, and no others."""
    results: dict[int, bool] = {}
    start = threading.Barrier(2)

    def work(number: int) -> None:
        layers = [weight_grad.Linear(IN, IN, bias=False) for _ in range(3)]
        start.wait()
        for _ in range(20):
            x, deferred = torch.randn(TOKENS, IN), DeferredGrads()
            output = layers[2](layers[1](layers[0](x))).sum()
            with deferring(deferred):
                output.backward()
            deferred_here = {id(one.weight) for ended in deferred._ended.values() for one in ended.values()}
            if deferred_here != {id(layer.weight) for layer in layers}:
                return
            deferred.run()
        results[number] = True

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {0: True, 1: True}


# Conversion


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
    with deferring(deferred):
        output.sum().backward()
    del output
    assert Watched.alive[0]() is None
    deferred.run()
    assert layer.weight.grad is not None


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
            with deferring(deferred):
                converted(data).abs().square().sum().backward()
            deferred.run()
        for ours, torchs in zip(converted.parameters(), layer.parameters()):
            assert torch.equal(ours.grad, torchs.grad)
