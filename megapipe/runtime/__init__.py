"""One step of a schedule on this rank, from the caller's arguments to the losses."""

from .pipeline import Pipeline
from .shapes import ShapeArguments
from .step import run_step, stages_for_rank
from .warming_up import warm_up

__all__ = ["Pipeline", "ShapeArguments", "run_step", "stages_for_rank", "warm_up"]
