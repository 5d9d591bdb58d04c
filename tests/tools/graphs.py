"""For tests of captured stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megapipe import graph

H = 16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def skip_without_tracer() -> None:
    """Skips the module, or the test, that calls it where torch is too old to capture anything."""
    try:
        graph.trace_joint(lambda x: (x * 2,), [torch.zeros(1, requires_grad=True)], "a test")
    except RuntimeError as error:
        pytest.skip(str(error), allow_module_level=True)
