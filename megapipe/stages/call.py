"""One call of a schedule: its arguments, checked and normalised, and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..config import StepConfig
from ..frameworks import Framework
from ..plan import StageInfo
from ..structure import Structure

if TYPE_CHECKING:
    from ..slices import SequenceSlice

Shapes = list[tuple[int, ...]]


@dataclass
class Call:
    """The arguments of one training or validation step, checked and normalised, and its results."""

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[nn.Module]
    num_microbatches: int
    config: StepConfig
    device: torch.device
    num_tokens: Tensor
    """Sum of the token counts of 3-tuple loss functions. It is float64 on every rank: counts may be weights, and more
    than 32 bits hold, and a trainer adds them up over ranks."""
    structures: Sequence[Structure]
    """The modules and parameters of each model (`structure_of`)."""
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    seq_length: int | None = None
    micro_batch_size: int | None = None
    decoder_seq_length: int | None = None
    pipeline_inputs: Any = None
    adjust_tensor_shapes_fn: Callable[[Shapes, Shapes], tuple[Shapes, Shapes]] | None = None
    schedule: Any = None
    frameworks: Sequence[Framework] = ()
    """The frameworks around megapipe that are in use."""
    stages: Sequence[StageInfo] = ()
    """The stage of each chunk."""
    slices: list[SequenceSlice] = field(default_factory=list)
    """The slices that each sequence is cut into; empty if sequences are not cut."""
    is_void: bool = False
    """Whether the results of this step are thrown away; the step is then run again with the same arguments."""
    results: list[Any] = field(default_factory=list)
    """The reports of the loss function, in microbatch order. Stays empty without the last stage."""

    @property
    def num_units(self) -> int:
        """How many forwards each chunk runs: one for each slice of each microbatch."""
        return self.num_microbatches * self.num_slices

    @property
    def num_slices(self) -> int:
        return max(1, len(self.slices))

    def of_slices(self, slices: Sequence[SequenceSlice]) -> list[Call]:
        """Returns a copy of the call for each slice, with the slice's length as `seq_length`; the call itself if there
        are no slices."""
        decoder = self.decoder_seq_length
        return [
            replace(self, seq_length=part.length, decoder_seq_length=None if decoder is None else part.length)
            for part in slices
        ] or [self]
