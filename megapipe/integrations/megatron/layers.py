"""Megatron's layers with weight gradients that are deferred to W."""

from __future__ import annotations

import functools
import re
import sys
from typing import Any, TypeVar

from torch import Tensor, nn

from ...weight_grad import linear

Module = TypeVar("Module", bound=nn.Module)


def defer_weight_gradients(module: Module) -> Module:
    """Make the layers that Megatron builds without transformer-engine leave their weight gradients to W: its
    ColumnParallelLinear and RowParallelLinear, as `weight_grad.convert` does with torch's. Call it before the model is
    wrapped or after.

    A layer's class is swapped and nothing else. Under tensor parallelism a layer whose backward communicates between
    its two products (a ColumnParallelLinear, or any with sequence parallelism) stays as it is: Megatron overlaps that
    communication with the weight gradient.

    Returns:
        `module` itself.
    """
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    for layer in module.modules():
        original: Any = type(layer)
        if original in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            layer.__class__ = _deferring_class(original)
    return module


def global_name(chunk: nn.Module, name: str) -> str:
    """The name that a parameter has in the whole model, where Megatron's chunk counts its layers from 0: for
    `megapipe.checkpoint.Checkpointer(..., global_name=global_name)`."""
    found = re.match(r"(.*?\blayers)\.(\d+)\.", name)
    inner: Any = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    number = found and getattr(inner.get_submodule(found[0][:-1]), "layer_number", None)
    return f"{found[1]}.{number - 1}.{name[found.end() :]}" if found and number else name


@functools.cache
def _deferring_class(original: Any) -> Any:
    def _forward_impl(self: Any, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        converts = options.get("output_dtype") not in (None, input.dtype)
        if options["allreduce_dgrad"] or options["sequence_parallel"] or converts:
            return original._forward_impl(self, input, weight, **options)  # type: ignore[no-any-return]
        return linear(input, weight, options["bias"])

    return type(original.__name__, (original,), {"__module__": original.__module__, "_forward_impl": _forward_impl})
