"""One step of a schedule on this rank, from the caller's arguments to the losses."""

from .notices import NoGradientWarning, TrainingWarning, UnsplitBackwardWarning
from .pipeline import Pipeline
from .pipeline_stage import PipelineStage
from .step import ForwardBackward, schedule, stages_for_rank
from .step_record import Clock, HostClock, RankStep, StepRecord, Wait, clock_of
from .warming_up import warm_up

__all__ = [
    "Clock",
    "ForwardBackward",
    "HostClock",
    "NoGradientWarning",
    "Pipeline",
    "PipelineStage",
    "RankStep",
    "StepRecord",
    "TrainingWarning",
    "UnsplitBackwardWarning",
    "Wait",
    "clock_of",
    "schedule",
    "stages_for_rank",
    "warm_up",
]
