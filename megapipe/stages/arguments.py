"""What a stage is told of its step, and where it leaves the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..config import PipelineConfig
from ..slices import SequenceSlice

__all__ = ["StepArguments"]


@dataclass
class StepArguments:
    """The caller's arguments of one step, and its results."""

    forward_step_func: Callable[..., Any]
    data_iterators: list[Any]
    models: list[nn.Module]
    num_microbatches: int
    config: PipelineConfig
    device: torch.device
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None
    slices: list[SequenceSlice] = field(default_factory=list)
    """The slices of every sequence; none where sequences are whole."""
    results: list[Any] = field(default_factory=list)
    """The reports of the loss function, in microbatch order. Stays empty without the last stage."""
    num_tokens: Tensor = field(init=False)
    """Sum of the token counts of 3-tuple loss functions, which may be weights, and more than 32 bits hold. The dtype is
    the same on every rank, for those who add it up over ranks."""

    def __post_init__(self) -> None:
        self.num_tokens = torch.zeros((), dtype=torch.float64, device=self.device)

    @property
    def num_units(self) -> int:
        """How many forwards each chunk runs."""
        return self.num_microbatches * self.num_slices

    @property
    def num_slices(self) -> int:
        return max(1, len(self.slices))
