"""Convolutions: split or not, they are torch's, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.one_layer import compare
from torch import nn

from megapipe import weight_grad

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
    with pytest.raises(RuntimeError, match="padding='same' is not supported for strided convolutions"):
        weight_grad.conv2d(x, weight, stride=2, padding="same")
