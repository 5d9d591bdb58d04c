"""Pipeline-parallel training for PyTorch, the Megatron way: one hand-written function per schedule."""

from typing import TYPE_CHECKING

from . import integrations as integrations
from . import schedules
from .first_use import names_on_first_use

if TYPE_CHECKING:
    from . import parallel_state, slices, weight_grad
    from .analysis import TimelineRecorder
    from .config import PipelineConfig
    from .failures import PipelineError
    from .gradients import discard_gradients
    from .integrations.splitting import CannotSplitError, split
    from .layouts import distribute_layers
    from .plan import StageInfo, schedule_names
    from .proving import prove
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
    "discard_gradients",
    "distribute_layers",
    "divide_by_num_tokens",
    "get_forward_backward_func",
    "parallel_state",
    "prove",
    "schedule",
    "schedule_names",
    "schedules",
    "slices",
    "split",
    "stages_for_rank",
    "warm_up",
    "weight_grad",
]

__getattr__, __dir__ = names_on_first_use(__name__)
