"""One stage of the model: its forward and its backward, unit by unit, without other ranks."""

from .arguments import StepArguments
from .edges import edge_of
from .notices import NoGradientWarning, TrainingWarning, UnsplitBackwardWarning, warn
from .overlapped import Forward, has_segments, run_pair
from .pipeline_stage import PipelineStage, as_sent
from .sliced import SlicedStage
from .stage import NOTHING, Stage
from .unit import Unit

__all__ = [
    "NOTHING",
    "Forward",
    "NoGradientWarning",
    "PipelineStage",
    "SlicedStage",
    "Stage",
    "StepArguments",
    "TrainingWarning",
    "Unit",
    "UnsplitBackwardWarning",
    "as_sent",
    "edge_of",
    "has_segments",
    "run_pair",
    "warn",
]
