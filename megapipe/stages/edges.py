"""Edges of autograd's graph: all that a backward needs of a forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

__all__ = ["edge_of"]


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """None for a tensor without a gradient."""
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
