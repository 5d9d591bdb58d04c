"""Pipeline-parallel training for PyTorch, the Megatron way: one hand-written function per schedule."""

from . import parallel_state, slices, weight_grad

from . import schedules, zero_bubble, combined, dualpipe  # noqa: F401  # isort: skip  # registered in this order
from . import integrations as integrations
from .analysis import TimelineRecorder
from .config import PipelineConfig
from .failures import PipelineError
from .integrations.splitting import CannotSplitError, split
from .layouts import distribute_layers
from .plan import StageInfo, schedule_names
from .runtime import schedule, stages_for_rank, warm_up
from .schedules import get_forward_backward_func
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

__version__ = "0.1.0"

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
