"""Megatron-LM: its process groups, its models, and the functions that its trainers import from its schedules.

A trainer changes one import:

    from megapipe import get_forward_backward_func   # was: from megatron.core.pipeline_parallel import ...

and may then name any schedule; `install` does so for a trainer that nobody edits. `megatron.core.parallel_state` is
used where it is initialised, `model.config` may be Megatron's own, and the scales of auxiliary losses are set as
Megatron's schedules set them. For schedules that split the backward there is `defer_weight_gradients`, and for those in
a V `build_model_chunks` and `at_its_stage`.

The functions that trainers import from Megatron's schedules (`forward_step`, `backward_step`, `get_tensor_shapes`, ...)
are there too: those of the Megatron that is installed, whose arguments change from release to release.
"""

from __future__ import annotations

import importlib
from typing import Any

from .installing import install, uninstall
from .layers import defer_weight_gradients, global_name
from .stages import at_its_stage, build_model_chunks
from .ties import framework

__all__ = ["at_its_stage", "build_model_chunks", "defer_weight_gradients", "global_name", "install", "uninstall"]

_MEGATRONS = (
    "backward_step",
    "backward_step_multimodule",
    "check_first_val_step",
    "clear_embedding_activation_buffer",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "finish_embedding_wgrad_compute",
    "forward_step",
    "forward_step_calc_loss",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_device",
    "get_tensor_shapes",
    "set_current_microbatch",
)


def __getattr__(name: str) -> Any:
    if name not in _MEGATRONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    where = "megatron.core.pipeline_parallel.schedules"
    try:
        schedules = importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{name} is Megatron's own, handed on from {where}, which cannot be imported ({error}): install "
            "megatron-core."
        ) from None
    if not hasattr(schedules, name):
        raise ImportError(f"{name} is Megatron's own, but the installed release has none in {where}.")
    return getattr(schedules, name)
