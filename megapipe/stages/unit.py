"""One microbatch, or one slice of it, on one chunk: from its receive to its last action."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..p2p_communication import Transfer
from ..weight_grad import DeferredGrads
from .delayed import DelayedGrads


@dataclass(slots=True, eq=False)
class UnitState:
    """What a unit holds between its actions: each takes what it needs, and leaves what it makes.

    What has been run is kept as the edges of its graph, not as tensors: a `GradientEdge` is all that backward needs. So
    an output is freed as soon as it has been sent, views included.
    """

    microbatch: int
    slice: int = 0
    received: Transfer | None = None
    """The input, arrived; None on the first stage. Kept for parts that are computed again in the backward."""
    inputs: list[Tensor] = field(default_factory=list)
    """The leaves whose gradients go to the previous stage."""
    output: Transfer | None = None
    """What F made, to be sent; None on the last stage."""
    edges: list[GradientEdge | None] = field(default_factory=list)
    """One per output that a gradient comes back for; None where it does not depend on anything trained. The graph hangs
    on them."""
    output_grads: list[Tensor] | None = None
    """The gradients of those. On the last stage, whose output is the loss, F sets it."""
    has_windows: bool = False
    """Whether F ran in segments, so that the backward may have overlap windows."""
    kept_by: dict[Any, Any] = field(default_factory=dict)
    """What an option keeps for this unit, by the class of its extension or stage."""
    before_backward: list[Callable[[], None]] = field(default_factory=list)
    """Called before its backward."""
    input_grads: Transfer | None = None
    """What B made, to be sent."""
    has_run_backward: bool = False
    """Whether anything of the stage depended on a gradient."""
    deferred: DeferredGrads | None = None
    """Weight gradients that are left to W."""
    delayed: DelayedGrads | None = None
    """Those that modules defer by themselves."""


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """All that a backward needs of a tensor: None where that has no gradient."""
    return get_gradient_edge(tensor) if tensor.requires_grad else None
