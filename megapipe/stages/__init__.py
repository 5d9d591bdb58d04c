"""One stage of the model: its forward and its backward, unit by unit, without other ranks."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .call import Call
    from .delayed import find_delayed
    from .extension import ActionFunction, Extension
    from .loss import Loss, call_loss_func, divide_loss
    from .notices import NoGradientWarning, TrainingWarning, UnsplitBackwardWarning, warn
    from .overlapped import Half, run_overlapped
    from .pipeline_stage import PipelineStage, as_sent
    from .stage import Stage
    from .unit import UnitState, edge_of

__all__ = ["NoGradientWarning", "PipelineStage", "TrainingWarning", "UnsplitBackwardWarning"]

__getattr__, __dir__ = names_on_first_use(__name__)
