"""Normalises and checks the arguments of one step, and lists those that ranks must agree on.

Every mistake of the caller is found here, before anything is computed.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import parallel_state
from ..chunks import find_attribute
from ..config import PER_CHUNK, StepConfig, check_whole_number, common_config
from ..frameworks import Framework, find_cut
from ..gradients import check_added_up
from ..plan import Placement, Schedule, StageInfo
from ..stages import Call
from ..transports import is_capturing
from .combinations import check_combinations
from .found_shapes import Specs, boundary_name
from .shapes import message_specs

GROUPS_WITH_SIZES = (("tensor_model_parallel_size", "tp"), ("context_parallel_size", "cp"))
"""Fields of the config, and the groups of a `pg_collection` that tell them."""

AGREED_ON = (
    "variable_seq_lengths",
    "microbatch_group_size_per_vp_stage",
    "max_in_flight",
    "min_pending_weights",
    "max_pending_weights",
    "recompute",
    "offload_activations",
    "p2p_transport",
    "p2p_max_ctas",
    "timeout",
    "broadcast_reports",
)
"""Fields of the config that must have the same value on all ranks."""


def pipeline_group(in_use: Sequence[Framework], pg_collection: Any, p2p_communicator: Any) -> dist.ProcessGroup | None:
    """The pipeline's process group: the caller's, or that of `parallel_state`. None without torch.distributed."""
    for framework in in_use:
        framework.check_groups(pg_collection)
        framework.check_groups(p2p_communicator)
    group = getattr(pg_collection, "pp", None) or getattr(p2p_communicator, "pp_group", None)
    if group is not None:
        return group  # type: ignore[no-any-return]
    return parallel_state.get_pipeline_model_parallel_group() if dist.is_initialized() else None


def config_of(
    in_use: Sequence[Framework], schedule: Schedule, models: Sequence[nn.Module], pg_collection: Any
) -> StepConfig:
    """The checked settings of the rank's chunks; sizes of groups are those of `pg_collection`."""
    config = common_config(map(find_attribute, models, itertools.repeat("config")))
    settings: dict[str, Any] = {}
    for name, short in GROUPS_WITH_SIZES if pg_collection is not None else ():
        group = getattr(pg_collection, short, None)
        if group is not None:
            settings[name] = group.size()
    for framework in in_use:
        settings |= framework.read_config(config, schedule)
    return StepConfig.of(config, **settings)


def chunks_of(model: Any) -> list[nn.Module]:
    """The rank's chunks. Raises TypeError for anything but a module or a list of them."""
    models = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
    wrong = [one for one in models if not isinstance(one, nn.Module)]
    if wrong or not models:
        given = f"a {type(wrong[0]).__name__}" if models else "an empty list"
        raise TypeError(f"model must be the rank's chunk, a torch.nn.Module, or a list of its chunks, got {given}.")
    return models


def iterator_per_chunk(data_iterator: Any, num_chunks: int) -> list[Any]:
    """Returns one iterator for each chunk. A single one is copied (tee), so that each chunk reads all its items.

    Raises:
        ValueError: it is a list of another length.
    """
    if isinstance(data_iterator, (list, tuple)):
        if len(data_iterator) != num_chunks:
            raise ValueError(
                f"data_iterator is a list of {len(data_iterator)} but there are {num_chunks} chunks: pass one iterator "
                "for each, or a single one for all. Of a list of microbatches, pass iter(list)."
            )
        return list(data_iterator)
    if data_iterator is None or num_chunks == 1:
        return [data_iterator] * num_chunks
    if not hasattr(data_iterator, "__next__"):  # each step would begin anew
        raise TypeError(
            f"data_iterator is a {type(data_iterator).__name__}, not an iterator: pass iter(...) of it, made once for "
            "all steps."
        )
    return list(itertools.tee(data_iterator, num_chunks))


def check_arguments(call: Call, stages: Sequence[StageInfo]) -> None:
    """Called when a runner is made. Raises ValueError or TypeError for wrong arguments."""
    for name in PER_CHUNK:
        functions = getattr(call.config, name)
        if isinstance(functions, (list, tuple)) and len(functions) != len(call.models):
            raise ValueError(
                f"config.{name} is a list of {len(functions)} but there are {len(call.models)} chunks: give one for "
                "each, or a single one for all."
            )
    lengths, num_slices = call.config.sequence_slice_lengths, call.config.num_sequence_slices
    if lengths is not None and len(lengths) != num_slices:
        raise ValueError(
            f"config.sequence_slice_lengths has {len(lengths)} lengths, but num_sequence_slices is {num_slices}: give "
            "one length for each slice."
        )
    per_stage = call.config.settings.recompute
    if isinstance(per_stage, tuple) and len(per_stage) != stages[0].num_stages:
        raise ValueError(
            f"config.recompute is a sequence of {len(per_stage)} but the pipeline has {stages[0].num_stages} stages: "
            "give one for each, or a single one for all."
        )
    for model, stage, structure in zip(call.models, stages, call.structures):
        _check_stage(model, stage)
        for change in structure.changes:
            raise ValueError(f"stage {stage.index} cannot run: {change}")
        if not stage.is_first and find_attribute(model, "set_input_tensor") is None:
            raise TypeError(
                f"the model of stage {stage.index} ({type(model).__name__}) has no set_input_tensor(input): wrap it "
                "in megapipe.PipelineStage, which calls it with its input, or give it one that keeps the input for the "
                "next forward."
            )
        if call.forward_only:
            continue
        find_cut(model, call.frameworks)  # may refuse it
    for framework in call.frameworks if not call.forward_only else ():
        framework.check_chunks(call.models)


def check_call(call: Call, pp_size: int) -> None:
    """Called in each step. Raises ValueError or TypeError for wrong arguments that no `CallKey` has in it."""
    check_whole_number("num_microbatches", call.num_microbatches, 1)
    if not callable(call.forward_step_func):
        raise TypeError(f"forward_step_func must be callable, got a {type(call.forward_step_func).__name__}.")
    if call.config.calculate_per_token_loss and not call.forward_only:
        check_added_up(call.models, call.config.finalize_model_grads_func is not None)
    if pp_size > 1 and not call.forward_only and call.config.grad_scale_func is not None:
        _check_scaler(call.config.grad_scale_func)
    if call.device.type != "cpu" and is_capturing(call.device):
        check_combinations(call, pp_size)
    if pp_size > 1 and call.config.num_microbatches_with_partial_activation_checkpoints is not None:
        try:
            inspect.signature(call.forward_step_func).bind(None, None, None)
        except TypeError:
            raise TypeError(
                "config.num_microbatches_with_partial_activation_checkpoints passes forward_step_func a third "
                "argument, checkpoint_activations_microbatch: let it take one, or leave the setting None."
            ) from None


def _check_stage(model: nn.Module, stage: StageInfo) -> None:
    """Raises ValueError if a chunk was made for another stage than the schedule runs it as."""
    made_for = find_attribute(model, "info")
    ends = ("pre_process", stage.is_first), ("post_process", stage.is_last)  # Megatron's models say no more
    lacks = [name for name, is_end in ends if is_end and find_attribute(model, name) is False]
    if isinstance(made_for, StageInfo):
        how = f"for stage {made_for.index} of {made_for.num_stages}" if made_for != stage else None
        remedy = "take the stages for chunks from megapipe.stages_for_rank"
    else:
        how = f"with {lacks[0]}=False" if lacks else None
        remedy = "make such chunks by build_model_chunks"
    if how is not None:
        raise ValueError(
            f"a chunk was made {how}, but the schedule runs it as stage {stage.index} of {stage.num_stages}: {remedy}, "
            "for the schedule that runs them, and pass them in that order."
        )


def is_forward_only(schedule: Schedule, forward_only: bool) -> bool:
    """Raises ValueError for a training step by a plan that trains nothing: its file may have been cut off."""
    if schedule.sizes is not None and schedule.forward_only and not forward_only:
        raise ValueError(
            f"{schedule.name} is a plan without backwards: pass forward_only=True, or take a plan that has them."
        )
    return forward_only or schedule.forward_only


def _check_scaler(grad_scale_func: Callable[..., Any]) -> None:
    scaler = getattr(grad_scale_func, "__self__", None)
    if not isinstance(scaler, torch.amp.GradScaler) or not scaler.is_enabled():
        return
    if type(scaler)._unscale_grads_ is torch.amp.GradScaler._unscale_grads_:  # others tell each other what they find
        raise ValueError(
            f"config.grad_scale_func is that of torch's {type(scaler).__name__}, which skips a step only on the rank "
            "that finds an Inf, and knows no scale on ranks without the loss: take a megapipe.PipelinedGradScaler."
        )


Peers = tuple[int | None, int | None]
"""The ranks of the previous and of the next stage. None if that is on the same rank, or there is no such stage."""
NO_PEERS: Peers = None, None


def remote_peers(stage: StageInfo, placement: Placement, pp_rank: int, pp_size: int) -> Peers:
    """The peers of a stage of this rank."""
    around = stage.index - 1, stage.index + 1
    ranks = [placement.rank(index, pp_size) if 0 <= index < stage.num_stages else None for index in around]
    below, above = (None if rank == pp_rank else rank for rank in ranks)
    return below, above


def specs_of(call: Call, stages: Sequence[StageInfo], peers: Sequence[Peers]) -> Specs:
    """Returns for each stage the specs of the messages from and to other ranks; None if neither the arguments nor the
    model tell them."""
    specs: Specs = []
    for model, stage, (below, above) in zip(call.models, stages, peers):
        if call.config.variable_seq_lengths or (below, above) == NO_PEERS:
            specs.append((None, None))
        else:
            parts = [message_specs(model, stage, part) for part in call.of_slices(call.slices)]
            received, sent = ([spec for spec in of_parts if spec is not None] for of_parts in zip(*parts))
            specs.append((None if below is None else received or None, None if above is None else sent or None))
    return specs


def to_agree_on(called: str, call: Call, stages: Sequence[StageInfo], specs: Specs) -> dict[str, str]:
    """Returns the arguments that ranks must agree on, with their values. Both ends of a boundary tell its message.

    Args:
        called: the name of the schedule.
    """
    arguments = {
        "the schedule": called,
        "the number of chunks per rank": str(len(stages)),
        "num_microbatches": str(call.num_microbatches),
        "the slices of a sequence": str([part.length for part in call.slices] or "none"),
        "forward_only": str(call.forward_only),
        "the type of device": call.device.type,
        "whether a PostValidatedOptimizer trains the model": str(call.config.post_validated_optimizer is not None),
    }
    arguments |= {name: str(getattr(call.config, name)) for name in AGREED_ON}
    for stage, (received, sent) in zip(stages, specs):
        if received is not None:
            arguments[boundary_name(stage.index - 1)] = ", then ".join(map(str, received))
        if sent is not None:
            arguments[boundary_name(stage.index)] = ", then ".join(map(str, sent))
    return arguments
