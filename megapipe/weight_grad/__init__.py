"""Split backward: weight gradients put off, to be computed when there is nothing more urgent.

A W needs nothing from other ranks and nobody waits for it. So a layer's backward computes the gradient of its input at
once, and hands the computation of its weight's gradient to `defer`.
"""

from .deferred import (
    DeferredGrads,
    SavedTensor,
    add_gradient,
    capturing,
    defer,
    deferring,
    is_capturing,
    is_deferring,
    keep,
    one_backward_at_a_time,
    unshared,
    visit_gradient_nodes,
)
from .layers import conv1d, conv2d, embedding, grouped_linear, linear
from .modules import Conv1d, Conv2d, Embedding, GroupedLinear, Linear, convert

__all__ = [
    "Conv1d",
    "Conv2d",
    "DeferredGrads",
    "Embedding",
    "GroupedLinear",
    "Linear",
    "SavedTensor",
    "add_gradient",
    "capturing",
    "conv1d",
    "conv2d",
    "convert",
    "defer",
    "deferring",
    "embedding",
    "grouped_linear",
    "is_capturing",
    "is_deferring",
    "keep",
    "linear",
    "one_backward_at_a_time",
    "unshared",
    "visit_gradient_nodes",
]
