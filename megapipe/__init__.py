"""Pipeline-parallel training for PyTorch, the Megatron way: one hand-written function per schedule."""

import os
import sys

__version__ = "0.1.0"


def _is_command() -> bool:
    """Whether this process runs `megapipe`, or `python -m megapipe`."""
    program = os.path.basename(next(iter(sys.argv), ""))
    return program in ("megapipe", "megapipe.exe") or (program == "-m" and sys.orig_argv[-len(sys.argv)] == __name__)


if not _is_command():  # which shows plans, and does without torch: that takes seconds to import
    from . import integrations as integrations
    from . import parallel_state, schedules, slices, weight_grad
    from .analysis import TimelineRecorder
    from .config import PipelineConfig
    from .failures import PipelineError
    from .integrations.splitting import CannotSplitError, split
    from .layouts import distribute_layers
    from .plan import StageInfo, schedule_names
    from .runtime import stages_for_rank, warm_up
    from .schedules import get_forward_backward_func, schedule
    from .stages import NoGradientWarning, PipelineStage, TrainingWarning, UnsplitBackwardWarning
    from .training import (
        PipelinedGradScaler,
        PipelinedLRScheduler,
        PipelinedOptimizer,
        PostValidatedOptimizer,
        TiedWeights,
        clip_grad_norm_,
        divide_by_num_tokens,
    )

__all__ = [
    "CannotSplitError",
    "NoGradientWarning",
    "PipelineConfig",
    "PipelineError",
    "PipelineStage",
    "PipelinedGradScaler",
    "PipelinedLRScheduler",
    "PipelinedOptimizer",
    "PostValidatedOptimizer",
    "StageInfo",
    "TiedWeights",
    "TimelineRecorder",
    "TrainingWarning",
    "UnsplitBackwardWarning",
    "clip_grad_norm_",
    "distribute_layers",
    "divide_by_num_tokens",
    "get_forward_backward_func",
    "parallel_state",
    "schedule",
    "schedule_names",
    "schedules",
    "slices",
    "split",
    "stages_for_rank",
    "warm_up",
    "weight_grad",
]
