"""Hooks for frameworks around megapipe. The modules in `integrations/` fill these lists, and a step calls the functions
in them, so that the core knows no framework by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn

from ..plan import Schedule
from .arguments import StepArguments

__all__ = [
    "AroundForward",
    "StepEnd",
    "around_finalizing",
    "around_forwards",
    "find_cut",
    "forwards_in_segments",
    "read_config",
]


ForwardStep = Callable[..., Any]


class AroundForward(NamedTuple):
    before: Callable[[int], None]
    """Called before each forward of a chunk with the microbatch."""
    after: Callable[[], None]
    """Called after each forward of a chunk."""


class StepEnd(NamedTuple):
    """A step whose loops are done."""

    step: StepArguments
    pp_rank: int
    pp_size: int
    last_stage: int
    """The rank that has the last stage, and with it the reports and the number of tokens."""
    finalize_keywords: dict[str, Any]
    """Further arguments of `finalize_model_grads_func`."""
    share: Callable[[Any], Any]
    """Called on every rank; returns what the rank of the last stage called it with."""


read_config: list[Callable[[Any, Schedule], dict[str, Any]]] = []
"""Called with `model.config` and the schedule at every step. Returns fields of `PipelineConfig` that the framework
has under other names; may raise ValueError."""

around_forwards: list[Callable[[nn.Module, int, torch.device], AroundForward | None]] = []
"""Called at every step for each chunk, with the number of its forwards and the device. Returns functions to be called
around its forwards, or None."""

forwards_in_segments: list[Callable[[nn.Module], Callable[[ForwardStep], ForwardStep] | None]] = []
"""Called at every step for each chunk that is trained. Returns what makes of the caller's forward_step_func one whose
outputs are `Segments`, for models that the framework cuts; or None."""

around_finalizing: list[Callable[[StepEnd], AbstractContextManager[None]]] = []
"""Entered on every rank when the loops of a step are done, and left when gradients are finalized."""


def find_cut(model: nn.Module) -> Callable[[ForwardStep], ForwardStep] | None:
    """What cuts the forwards of a chunk into segments, if a framework does."""
    return next((cut for find in forwards_in_segments if (cut := find(model)) is not None), None)
