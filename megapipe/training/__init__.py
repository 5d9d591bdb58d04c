"""What a trainer puts around a step: batches, replicas, clipping, tied weights, optimizers."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .batches import data_iterators, split_batch
    from .clipping import clip_grad_norm_
    from .data_parallel import GradientReducer, divide_by_num_tokens
    from .log_probs import log_probs_of
    from .optimizer import OF_EACH_GROUP, PipelinedGradScaler, PipelinedLRScheduler, PipelinedOptimizer, load_scheduler
    from .packing import pack
    from .post_validation import PostValidatedOptimizer, finalize_weights
    from .tied_weights import TiedWeights

__all__ = [
    "GradientReducer",
    "PipelinedGradScaler",
    "PipelinedLRScheduler",
    "PipelinedOptimizer",
    "PostValidatedOptimizer",
    "TiedWeights",
    "clip_grad_norm_",
    "data_iterators",
    "divide_by_num_tokens",
    "log_probs_of",
    "pack",
    "split_batch",
]

__getattr__, __dir__ = names_on_first_use(__name__)
