"""Products for weights: Apex's kernels, and those on CUDA."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from tools.graphs import skip_without_tracer
from tools.one_layer import IN, OUT, backward
from torch import Tensor, nn

from megapipe import weight_grad
from megapipe.graph import capture
from megapipe.weight_grad import products


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("operands", [torch.float32, torch.bfloat16])
def test_products_are_added_whatever_the_dtypes(operands: torch.dtype, target: torch.dtype) -> None:
    """Of small whole numbers, which every dtype holds exactly."""
    x, grad = (torch.arange(12.0).view(3, 4).to(operands), torch.ones(3, 2, dtype=operands))
    total = torch.ones(2, 4, dtype=target)
    products.add_weight_gradient(total, x, grad)
    assert torch.equal(total, 1 + x.to(target).sum(0).expand(2, 4))


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


def test_captured_stages_add_products_so_too(request: pytest.FixtureRequest) -> None:
    """They made each gradient first, and then added it: W took 15 % longer than that of layers on an H100."""
    skip_without_tracer()
    stage = nn.Sequential(nn.Linear(IN, OUT), nn.Linear(OUT, IN, bias=False)).bfloat16()
    x = torch.randn(3, 2, IN, dtype=torch.bfloat16)
    with torch.no_grad():
        hidden = stage[0](x).flatten(0, 1)
    capture(stage, (x.clone().requires_grad_(),))
    apex: Apex = request.getfixturevalue("apex")  # not before: the example is on the CPU
    for layer in stage:
        layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
    backward(stage(x.requires_grad_()).sum())
    assert apex.calls == ["fp32", "fp32"]
    want = hidden.float().sum(0).expand(IN, OUT)
    torch.testing.assert_close(stage[1].weight.main_grad, want, atol=2e-2, rtol=2e-2)


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


def test_what_fake_tensors_can_is_not_kept() -> None:
    """After `bytes_of_stages` products in bfloat16 were to be added to float32 by what torch has for fake tensors only:
    the next W raised."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    products._addmm_widens.cache_clear()
    with FakeTensorMode():
        found = products._addmm_widens("cpu", torch.bfloat16, torch.float32)
    products._addmm_widens.cache_clear()
    assert found == products._addmm_widens("cpu", torch.bfloat16, torch.float32)
