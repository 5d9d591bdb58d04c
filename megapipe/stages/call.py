"""One call of a schedule: its arguments in one form, and its results."""

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
    """The caller's arguments of one step, and its results."""

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[nn.Module]
    num_microbatches: int
    config: StepConfig
    device: torch.device
    num_tokens: Tensor
    """Sum of the token counts of 3-tuple loss functions, which may be weights, and more than 32 bits hold: float64 on
    every rank, for those who add it up over ranks."""
    structures: Sequence[Structure]
    """What each of the models is made of."""
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
    """Those around megapipe that are in use."""
    stages: Sequence[StageInfo] = ()
    """Those of the chunks."""
    slices: list[SequenceSlice] = field(default_factory=list)
    """The slices of every sequence; none where sequences are whole."""
    is_void: bool = False
    """Whether what it computes counts for nothing: then it is made once more, from the arguments that are here."""
    results: list[Any] = field(default_factory=list)
    """The reports of the loss function, in microbatch order. Stays empty without the last stage."""

    @property
    def num_units(self) -> int:
        """How many forwards each chunk runs."""
        return self.num_microbatches * self.num_slices

    @property
    def num_slices(self) -> int:
        return max(1, len(self.slices))

    def of_slices(self, slices: Sequence[SequenceSlice]) -> list[Call]:
        """The call of each slice, as if it were a sequence; of whole sequences this one."""
        decoder = self.decoder_seq_length
        return [
            replace(self, seq_length=part.length, decoder_seq_length=None if decoder is None else part.length)
            for part in slices
        ] or [self]
