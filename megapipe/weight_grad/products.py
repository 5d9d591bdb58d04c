"""The weight gradient of a matrix product, and adding it to what is there in one go.

Everything is two-dimensional here: input [tokens, in], output gradient [tokens, out], weight [out, in].
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

_APEX_FUNCTIONS = {
    torch.float32: "wgrad_gemm_accum_fp32",
    torch.float16: "wgrad_gemm_accum_fp16",
    torch.bfloat16: "wgrad_gemm_accum_fp16",
}


def rows(tensor: Tensor) -> Tensor:
    """[..., n] as [tokens, n]; also if there are no tokens or no leading dimensions."""
    if tensor.dim() == 1:
        return tensor.unsqueeze(0)
    return tensor if tensor.dim() == 2 else tensor.reshape(tensor.shape[:-1].numel(), tensor.shape[-1])


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor.to(dtype)`, which takes longer to find nothing to do than a small product."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """[out, in]."""
    return grad.t().mm(x)


def add_weight_gradient(target: Tensor, x: Tensor, grad: Tensor) -> None:
    """Add the weight gradient to `target` [out, in], without a temporary of its size if torch or apex can do so.

    That is: where the dtypes are equal; and on CUDA where `target` is float32 and the operands are half as wide, by
    apex's kernel or by `addmm` with an `out_dtype`.
    """
    apex = _apex_function(target.dtype) if x.is_cuda and x.dtype.itemsize == 2 and target.is_contiguous() else None
    if apex is not None:
        apex(x.contiguous(), grad.contiguous(), target)
    elif target.dtype == x.dtype:
        target.addmm_(grad.t(), x)
    elif _addmm_widens(x.device.type, x.dtype, target.dtype):
        torch.addmm(target, grad.t(), x, out_dtype=target.dtype, out=target)
    else:
        target.add_(weight_gradient(x, grad))


@functools.cache
def _apex_function(target: torch.dtype) -> Callable[[Tensor, Tensor, Tensor], None] | None:
    """Takes (input, output gradient, target), all contiguous, and adds to the target."""
    try:
        apex: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")
    except ImportError:
        return None
    return getattr(apex, _APEX_FUNCTIONS.get(target, ""), None)


@functools.cache
def _addmm_widens(device_type: str, operand: torch.dtype, target: torch.dtype) -> bool:
    """Whether this device multiplies matrices of one dtype and adds the product to another."""
    with _disable_current_modes():  # torch's fake tensors can what their device cannot
        matrix = torch.zeros(16, 16, dtype=operand, device=device_type)
        out = torch.zeros(16, 16, dtype=target, device=device_type)
        try:
            torch.addmm(out, matrix, matrix, out_dtype=target, out=out)
        except RuntimeError:  # NotImplementedError is one
            return False
        return True
