"""One microbatch, or one slice of it, on one chunk: from its receive to its last action."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..p2p_communication import Transfer
from ..weight_grad import DeferredGrads
from .delayed import DelayedGrads


@dataclass(slots=True, eq=False)
class UnitState:
    """What is kept of one microbatch (or slice) on one stage between its actions. Each action takes its inputs from
    here and puts its results here.

    The autograd graph is kept by its `GradientEdge`s, not by tensors: an edge is all that backward needs. So an output
    is freed as soon as it has been sent, views included.
    """

    microbatch: int
    slice: int = 0
    parts: Iterator[None] | None = None
    """What is left of its F, of which each call runs the next part; None where it is run at once."""
    received: Transfer | None = None
    """The input; None on the first stage. Kept for layers that are recomputed in the backward."""
    inputs: list[Tensor] = field(default_factory=list)
    """The leaves whose gradients go to the previous stage."""
    output: Transfer | None = None
    """The result of F, to be sent; None on the last stage."""
    edges: list[GradientEdge | None] = field(default_factory=list)
    """One for each output tensor that gets a gradient; None if that output does not depend on anything trained. They
    keep the graph alive."""
    output_grads: list[Tensor] | None = None
    """The gradients of these outputs. On the last stage, whose output is the loss, F sets them."""
    has_windows: bool = False
    """Whether F ran in segments, so that the backward may have overlap windows."""
    kept_by: dict[Any, Any] = field(default_factory=dict)
    """What an option keeps for this unit, by the class of its extension or stage."""
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called before its backward."""
    input_grads: Transfer | None = None
    """The result of B, to be sent."""
    has_run_backward: bool = False
    """Whether autograd had anything to run: some output depended on an input or parameter that needs a gradient."""
    deferred: DeferredGrads | None = None
    """Weight gradients that layers have deferred to W by `weight_grad.defer`."""
    delayed: DelayedGrads | None = None
    """Weight gradients that modules with `backward_dw` defer by themselves."""


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """The edge at which the backward of a tensor begins; None if the tensor does not require a gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
