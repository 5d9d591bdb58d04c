"""A model that is run slice by slice on one rank, without a pipeline: forwards in order, backwards in reverse."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megapipe.config import StepConfig
from megapipe.options import sequence_slices
from megapipe.proving.whole import Whole
from megapipe.slices import SequenceSlice
from megapipe.weight_grad import AT_ONCE, DeferredGrads

Run = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def plain(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def recomputed(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=False)


def recomputed_reentrant(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return checkpoint(layer, x, use_reentrant=True)


def config_of(lengths: Sequence[int]) -> StepConfig:
    return StepConfig(num_sequence_slices=len(lengths), sequence_slice_lengths=lengths)


def make_slices(lengths: Sequence[int]) -> list[SequenceSlice]:
    return sequence_slices(config_of(lengths), sum(lengths))


def run_by_slices(
    step: Callable[[], Tensor], lengths: Sequence[int], deferred: bool = False, forward_only: bool = False
) -> Tensor:
    """Returns the sum of the slices' losses, after their backwards.

    Args:
        step: the model and its loss, of the current slice.
        deferred: weight gradients are left to Ws behind the last B.
    """
    forward_step = lambda *_: (step(), lambda loss: (loss, loss.detach()))  # noqa: E731
    whole = Whole([nn.Identity()], forward_step, config_of(lengths), sum(lengths))
    later = DeferredGrads() if deferred else None
    with later or AT_ONCE:
        loss: Tensor = whole.run(None, 1, forward_only)
    if later is not None:
        later.run()
    return loss
