"""One microbatch, or one slice of it, on one chunk: from its receive to its last action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..p2p_communication import Transfer
from ..weight_grad import DeferredGrads
from .delayed import DelayedGrads

__all__ = ["Unit", "edge_of"]


class Unit:
    """What a unit holds between its actions: each takes what it needs, and leaves what it makes.

    What has been run is kept as the edges of its graph, not as tensors: a `GradientEdge` is all that backward needs. So
    an output is freed as soon as it has been sent, views included.
    """

    __slots__ = (
        "before_backward",
        "deferred",
        "delayed",
        "edges",
        "has_run_backward",
        "has_windows",
        "input_grads",
        "inputs",
        "microbatch",
        "of",
        "output",
        "output_grads",
        "received",
        "slice",
    )

    def __init__(self, microbatch: int, slice: int = 0) -> None:
        self.microbatch = microbatch
        self.slice = slice
        self.received: Transfer | None = None
        """The input, arrived; None on the first stage. Kept for parts that are computed again in the backward."""
        self.inputs: list[Tensor] = []
        """The leaves whose gradients go to the previous stage."""
        self.output: Transfer | None = None
        """What F made, to be sent; None on the last stage."""
        self.edges: list[GradientEdge | None] = []
        """One per output that a gradient comes back for; None where it does not depend on anything trained. The graph
        hangs on them."""
        self.output_grads: list[Tensor] | None = None
        """The gradients of those. On the last stage, whose output is the loss, F sets it."""
        self.has_windows = False
        """Whether F ran in segments, so that the backward may have overlap windows."""
        self.of: dict[Any, Any] = {}
        """What options keep with it."""
        self.before_backward: list[Callable[[], None]] = []
        """Called before its backward."""
        self.input_grads: Transfer | None = None
        """What B made, to be sent."""
        self.has_run_backward = False
        """Whether anything of the stage depended on a gradient."""
        self.deferred: DeferredGrads | None = None
        """Weight gradients that are left to W."""
        self.delayed: DelayedGrads | None = None
        """Those that modules defer by themselves."""


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """All that a backward needs of a tensor: None where that has no gradient."""
    if not tensor.requires_grad:
        return None
    node: Any = tensor.grad_fn
    if node is None:  # a leaf
        return get_gradient_edge(tensor)
    if isinstance(node, torch._C._FunctionBase):
        # The node of a Python Function goes with its outputs, although an edge to it is held. That of a view owns it.
        tensor = tensor.view_as(tensor)
        node = tensor.grad_fn
    return GradientEdge(node, tensor.output_nr)
