"""The modules of Megatron that are imported already, and whether a step belongs to one of its trainers."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from ...chunks import find_attribute
from ...parallel_state import Groups

__all__ = ["groups", "is_in_use", "loaded", "megatrons_config"]


def loaded(name: str) -> Any:
    """A module of Megatron, where it is imported already; None elsewhere."""
    return sys.modules.get(f"megatron.core.{name}")


def groups() -> Groups | None:
    parallel_state = loaded("parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return Groups(
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_data_parallel_group(check_initialized=False),
    )


def megatrons_config(model: nn.Module) -> Any:
    """The config of a chunk where that is Megatron's own."""
    module = loaded("model_parallel_config")
    config = find_attribute(model, "config")
    return config if module is not None and isinstance(config, module.ModelParallelConfig) else None


def is_in_use(models: Sequence[nn.Module]) -> bool:
    """Whether these chunks are trained by Megatron's rules: its groups exist, or the config is its own."""
    return groups() is not None or any(megatrons_config(model) is not None for model in models)
