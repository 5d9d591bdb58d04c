"""Attention slice by slice on a GPU, whose kernels take no mask; without one on the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tools.by_slices import run_by_slices
from torch import Tensor

from megapipe import slices

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SEQUENCE = 160


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 2e-3), (torch.float64, 1e-12)]
)
def test_gradients_are_those_of_whole_sequences(dtype: torch.dtype, tolerance: float, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        drawn = torch.randn(2, heads, SEQUENCE, 32, generator=generator, dtype=torch.float64)
        return drawn.to(DEVICE, dtype).requires_grad_()

    given = draw(4), draw(kv_heads), draw(kv_heads)
    weights = draw(4).detach()
    many = kv_heads != 4
    whole = (F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=many) * weights).sum()
    expected = torch.autograd.grad(whole, given)

    def step() -> Tensor:
        query, key, value = (slices.cut(tensor, 2) for tensor in given)
        mixed = slices.attention(query, key, value, owner="layer", enable_gqa=many)
        return (mixed * slices.cut(weights, 2)).sum()

    run_by_slices(step, [64, 56, 40])
    for tensor, wanted in zip(given, expected, strict=True):
        assert tensor.grad is not None
        assert (tensor.grad - wanted).norm() <= tolerance * wanted.norm()
