"""GPT-2's linear layers, whose weights are [in, out], with deferred weight gradients."""

from __future__ import annotations

import functools
import importlib
from typing import Any

from torch import Tensor

from ...weight_grad import let_convert, transposed_linear

__all__ = ["let_convert_conv1d"]


@functools.cache
def let_convert_conv1d() -> None:
    """Let `weight_grad.convert` know transformers' Conv1D."""
    original: Any = importlib.import_module("transformers.pytorch_utils").Conv1D

    def forward(self: Any, x: Tensor) -> Tensor:
        return transposed_linear(x, self.weight, self.bias)

    members = {"__module__": original.__module__, "forward": forward}
    let_convert(original, type(original.__name__, (original,), members))
