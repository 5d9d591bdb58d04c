"""Megatron's modules where they are imported, whether a step belongs to one of its trainers, and the settings that its
schedules look at: followed, or refused by name; and what these do around forwards."""

from __future__ import annotations

import copy
import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...chunks import find_attribute
from ...frameworks import AgreedStep, AroundForward
from ...parallel_state import Groups
from ...plan import Schedule


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


# Features of Megatron's own schedules.
_UNSUPPORTED = ("defer_embedding_wgrad_compute", "hybrid_context_parallel", "moe_paged_stash", "use_ring_exchange_p2p")

_OFFLOADING = "pipeline_parallel.fine_grained_activation_offload"
_INTERFACE = "FineGrainedActivationOffloadingInterface"

_MEGATRONS_ORDERS = ("no_pipelining", "1f1b", "interleaved_1f1b")
"""Schedules that run forwards and backwards in the order that Megatron's have."""


def read_config(config: Any, schedule: Schedule) -> dict[str, Any]:
    for name in _UNSUPPORTED:
        if getattr(config, name, False):
            raise ValueError(
                f"config.{name} is part of Megatron's own schedules and not supported here: set it to False."
            )
    _check_cuda_graphs(config, schedule)
    if getattr(config, "overlap_moe_expert_parallel_comm", False):
        _check_overlap(config, schedule)
    _check_offloading(config, schedule)
    if not getattr(config, "mtp_standalone", False):
        return {}
    if schedule.placement.name != "loop":
        raise ValueError(
            f"config.mtp_standalone puts multi-token prediction and its copy of the embedding on another rank than the "
            f"first, and {schedule.name} ties embeddings on the first rank only: leave the prediction on the last "
            "stage, or use a schedule without a V, such as interleaved_1f1b."
        )
    return {"variable_seq_lengths": True}  # the messages between prediction and loss have a shape of their own


def _check_cuda_graphs(config: Any, schedule: Schedule) -> None:
    kind = getattr(config, "cuda_graph_impl", None) or "none"
    if kind == "none":
        return
    if kind != "transformer_engine":
        raise ValueError(f"config.cuda_graph_impl={kind!r} captures Megatron's own schedules: set it to 'none'.")
    if not _is_in_megatrons_order(config, schedule):
        raise ValueError(
            f"config.cuda_graph_impl='transformer_engine' captures microbatches in the order of Megatron's own "
            f"schedules, which {schedule.name} does not keep to: set it to 'none', or use 1f1b or interleaved_1f1b "
            "without max_in_flight."
        )


def _check_overlap(config: Any, schedule: Schedule) -> None:
    name = "config.overlap_moe_expert_parallel_comm"
    if schedule.name in _MEGATRONS_ORDERS:
        raise ValueError(
            f"{name} overlaps forwards with backwards, and {schedule.name} runs one after the other: take "
            "combined_1f1b, Megatron's schedule with that setting (MEGAPIPE_SCHEDULE=combined_1f1b), or set it False."
        )
    if getattr(config, "fp8", None) and config.fp8_recipe == "delayed":
        raise ValueError(
            f"{name} runs nodes of two microbatches in turn, and config.fp8_recipe='delayed' scales by what a whole "
            "forward has seen: take another recipe, or set one of them to False."
        )


def _check_offloading(config: Any, schedule: Schedule) -> None:
    if not getattr(config, "fine_grained_activation_offloading", False):
        return
    instead = "set it to False, and config.offload_activations to the time of a copy over that of a forward"
    if getattr(config, "offload_activations", None) is not None:
        raise ValueError(
            "config.fine_grained_activation_offloading and config.offload_activations both move activations to host "
            f"memory, the former those of some modules only: {instead}, or that to None."
        )
    if not _is_in_megatrons_order(config, schedule):
        raise ValueError(
            f"config.fine_grained_activation_offloading moves activations in the order of Megatron's own schedules, "
            f"which {schedule.name} does not keep to: {instead}, or use 1f1b or interleaved_1f1b without max_in_flight."
        )
    if not hasattr(loaded(_OFFLOADING), _INTERFACE):
        raise ValueError(
            f"config.fine_grained_activation_offloading takes a Megatron with {_INTERFACE}, such as 0.16: {instead}."
        )


def _is_in_megatrons_order(config: Any, schedule: Schedule) -> bool:
    return schedule.name in _MEGATRONS_ORDERS and getattr(config, "max_in_flight", None) is None


@contextmanager
def reset_offloading(step: AgreedStep) -> Iterator[None]:
    """What Megatron's schedules do for its own offloading, whose copies are made by its modules."""
    yield
    config = megatrons_config(step.call.models[0])
    if not step.call.forward_only and getattr(config, "fine_grained_activation_offloading", False):
        getattr(loaded(_OFFLOADING), _INTERFACE).reset()


def check_groups(groups: Any) -> None:
    if any(base.__name__.startswith("MultiModule") for base in type(groups).__mro__):
        raise ValueError(
            f"a {type(groups).__name__} describes several models in pipelines of their own, which only Megatron's own "
            "schedules run: pass the groups of one pipeline."
        )


def around_forwards(model: nn.Module, num_forwards: int, device: torch.device) -> AroundForward | None:
    """Megatron's own functions, of the release that is there: each has more per-microbatch state, and more scales of
    losses that are attached to the graph and not returned."""
    config = megatrons_config(model)
    if config is None:
        return None
    schedules = importlib.import_module("megatron.core.pipeline_parallel.schedules")
    without_timers = copy.copy(config)  # the function would stop one that it has not started
    without_timers.timers = None
    return AroundForward(
        functools.partial(schedules.set_current_microbatch, model),
        functools.partial(
            schedules.forward_step_calc_loss,
            model,
            torch.empty(0, device=device),
            loss_func=None,
            config=without_timers,
            vp_stage=None,
            collect_non_loss_data=False,
            num_microbatches=num_forwards,
            forward_data_store=[],
            cp_group_size=config.context_parallel_size,
            is_last_stage=False,  # the loss itself is not its business here, only the scales
        ),
    )
