"""Layers that compute input gradients now (B) and weight gradients later (W), when nothing is more urgent.

A W needs nothing from other ranks, and no rank waits for it. So a layer's backward computes the gradient of its input
at once, and hands the computation of its weight's gradient to `defer`.
"""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .accumulation import add_gradient
    from .aliasing import SavedTensor, save_for_w
    from .context import backward_context, this_thread
    from .deferred import (
        AT_ONCE,
        CHECKPOINTS,
        DeferredGrads,
        capturing,
        defer,
        deferring_to,
        is_capturing,
        visit_gradient_nodes,
    )
    from .grouped import grouped_linear
    from .layer_base import autocast_dtype, once_differentiable
    from .layers import embedding, linear, transposed_linear
    from .modules import Embedding, GroupedLinear, Linear, convert, let_convert
    from .products import add_weight_gradient

__all__ = [
    "Embedding",
    "GroupedLinear",
    "Linear",
    "convert",
    "defer",
    "embedding",
    "grouped_linear",
    "is_capturing",
    "let_convert",
    "linear",
    "transposed_linear",
]

__getattr__, __dir__ = names_on_first_use(__name__)
