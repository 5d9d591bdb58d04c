"""A model that is run slice by slice on one rank, without a pipeline: forwards in order, backwards in reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megapipe.slices import CarriedState, SequenceSlice
from megapipe.weight_grad import AT_ONCE, DeferredGrads

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plain(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def recomputed(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def recomputed_reentrant(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def make_slices(lengths: Sequence[int]) -> list[SequenceSlice]:
    starts = [0, *accumulate(lengths)]
    return [SequenceSlice(index, len(lengths), starts[index], length) for index, length in enumerate(lengths)]


def run_by_slices(
    step: Callable[[], Tensor], lengths: Sequence[int], deferred: bool = False, forward_only: bool = False
) -> Tensor:
    """Returns the sum of the slices' losses, after their backwards.

    Args:
        step: the model and its loss, of the current slice.
        deferred: weight gradients are left to a W after each B.
    """
    state = CarriedState(needs_grad=not forward_only)
    slices = make_slices(lengths)
    losses = []
    for this in slices:
        with state.forward(this):
            losses.append(step())
    for this, loss in [] if forward_only else zip(reversed(slices), reversed(losses)):
        with state.backward(this):
            roots = state.roots(this.index)
            edges, grads = zip((loss, torch.ones_like(loss)), *roots)
            later = DeferredGrads() if deferred else None
            with later or AT_ONCE:
                torch.autograd.backward(edges, grads)
            if later is not None:
                later.run()
    return torch.stack([loss.detach() for loss in losses]).sum()
