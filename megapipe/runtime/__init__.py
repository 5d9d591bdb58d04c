"""One step of a schedule on this rank, from the caller's arguments to the losses."""

from .pipeline import Pipeline
from .step import ForwardBackward, schedule, stages_for_rank
from .warming_up import warm_up

__all__ = ["ForwardBackward", "Pipeline", "schedule", "stages_for_rank", "warm_up"]
