"""One step of a schedule on this rank, from the caller's arguments to the losses."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .grad_sync import GradientSync
    from .pipeline import Pipeline, action_functions
    from .step import run_step, stages_for_rank
    from .warming_up import warm_up

__all__ = ["stages_for_rank", "warm_up"]

__getattr__, __dir__ = names_on_first_use(__name__)
