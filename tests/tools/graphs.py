"""For tests of captured stages."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from tools.against import Received
from torch import Tensor, nn

from megapipe import StageInfo, graph

H = 16


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Part(Received):
    """A stage in the middle or at the end, as pipelines have it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(StageInfo(1, 3))
        self.inner = inner

    def forward(self, tokens: Tensor | None = None) -> Tensor:
        return self.inner(self.input_tensor)


def sequence() -> Tensor:
    return torch.randn(5, 2, H, requires_grad=True)


def quick_inductor() -> Any:
    """To compile each header, and for each set of instructions that the processor may have, takes half a minute. By
    threads of its own, which stay, it would not be quicker."""
    inductor = importlib.import_module("torch._inductor.config")
    return inductor.patch({"cpp.vec_isa_ok": False, "cpp_cache_precompile_headers": False, "compile_threads": 1})


def skip_without_tracer() -> None:
    """Skips the module, or the test, that calls it where torch is too old to capture anything."""
    try:
        graph.trace_joint(lambda x: (x * 2,), [torch.zeros(1, requires_grad=True)], "a test")
    except RuntimeError as error:
        pytest.skip(str(error), allow_module_level=True)
