"""Split backward: weight gradients put off, to be computed when there is nothing more urgent.

A W needs nothing from other ranks and nobody waits for it. So a layer's backward computes the gradient of its input at
once, and hands the computation of its weight's gradient to `defer`.
"""

from .layers import conv1d, conv2d, embedding, grouped_linear, linear
from .modules import Conv1d, Conv2d, Embedding, GroupedLinear, Linear, convert
from .putting_off import defer, is_capturing

__all__ = [
    "Conv1d",
    "Conv2d",
    "Embedding",
    "GroupedLinear",
    "Linear",
    "conv1d",
    "conv2d",
    "convert",
    "defer",
    "embedding",
    "grouped_linear",
    "is_capturing",
    "linear",
]
