"""Pipeline-parallel training for PyTorch, the Megatron way: one hand-written function per schedule."""

from . import parallel_state, weight_grad

from . import schedules, zero_bubble, dualpipe  # noqa: F401  # isort: skip  # registered in this order
from . import integrations as integrations
from .clipping import clip_grad_norm_
from .config import PipelineConfig
from .failures import PipelineError
from .optimizer import PipelinedGradScaler, PipelinedLRScheduler, PipelinedOptimizer
from .per_token import divide_by_num_tokens
from .placement import StageInfo, distribute_layers
from .post_validation import PostValidatedOptimizer
from .recorder import TimelineRecorder
from .registry import schedule_names
from .schedules import get_forward_backward_func
from .stage import NoGradientWarning
from .step import schedule, stages_for_rank
from .tied_weights import TiedWeights

__version__ = "0.1.0"

__all__ = [
    "NoGradientWarning",
    "PipelineConfig",
    "PipelineError",
    "PipelinedGradScaler",
    "PipelinedLRScheduler",
    "PipelinedOptimizer",
    "PostValidatedOptimizer",
    "StageInfo",
    "TiedWeights",
    "TimelineRecorder",
    "clip_grad_norm_",
    "distribute_layers",
    "divide_by_num_tokens",
    "get_forward_backward_func",
    "parallel_state",
    "schedule",
    "schedule_names",
    "schedules",
    "stages_for_rank",
    "weight_grad",
]
