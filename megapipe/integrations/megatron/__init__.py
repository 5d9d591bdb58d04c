"""Megatron-LM: its process groups, its models, and the functions that its trainers import from its schedules.

A trainer changes one import:

    from megapipe import get_forward_backward_func   # was: from megatron.core.pipeline_parallel import ...

and may then name any schedule. `megatron.core.parallel_state` is used where it is initialised, `model.config` may be
Megatron's own, and the scales of auxiliary losses are set as Megatron's schedules set them. For schedules that split
the backward there is `put_off_weight_gradients`, and for those in a V `build_model_chunks`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import hooks
from ..arguments import StepArguments
from ..config import PipelineConfig
from ..names import find_attribute
from ..placement import StageInfo
from ..registry import Schedule, find_schedule
from ..stage import Stage, run_backward
from ..step import stages_for_rank
from ..weight_grad.layers import linear

__all__ = [
    "backward_step",
    "build_model_chunks",
    "custom_backward",
    "deallocate_output_tensor",
    "forward_step",
    "get_schedule_table",
    "get_tensor_shapes",
    "put_off_weight_gradients",
]

Module = TypeVar("Module", bound=nn.Module)


# What the core asks for


def _loaded(name: str) -> Any:
    """A module of Megatron, if somebody has imported it."""
    return sys.modules.get(f"megatron.core.{name}")


def _groups() -> hooks.Groups | None:
    parallel_state = _loaded("parallel_state")
    if parallel_state is None or not parallel_state.model_parallel_is_initialized():
        return None
    return hooks.Groups(
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_group(check_initialized=False),
        parallel_state.get_expert_data_parallel_group(check_initialized=False),
    )


# Features of Megatron's own schedules, with what to do instead.
_UNSUPPORTED = {
    "defer_embedding_wgrad_compute": "set it to False",
    "overlap_moe_expert_parallel_comm": "set it to False",
    "hybrid_context_parallel": "set it to False",
    "fine_grained_activation_offloading": "set it to False",
    "use_ring_exchange_p2p": "set it to False",
}


def _check_config(config: Any) -> None:
    for name, remedy in _UNSUPPORTED.items():
        if getattr(config, name, False):
            raise ValueError(f"config.{name} is part of Megatron's own schedules and not supported here: {remedy}.")
    if getattr(config, "cuda_graph_impl", "none") == "local":
        raise ValueError("config.cuda_graph_impl='local' captures Megatron's own schedules: set it to 'none'.")


def _around_forwards(model: nn.Module, num_microbatches: int, device: torch.device) -> hooks.AroundForward | None:
    if _loaded("parallel_state") is None:
        return None
    config = find_attribute(model, "config")
    return hooks.AroundForward(
        functools.partial(_set_current_microbatch, model),
        functools.partial(_scale_auxiliary_losses, config, num_microbatches, device),
    )


def _set_current_microbatch(model: nn.Module, microbatch: int) -> None:
    """Megatron's layers keep per-microbatch state under this number."""
    decoder = find_attribute(model, "decoder")
    for layer in getattr(decoder, "layers", ()):
        layer.current_microbatch = microbatch
    mtp = find_attribute(model, "mtp")
    for layer in getattr(mtp, "layers", ()):
        layer.transformer_layer.current_microbatch = microbatch


def _scale_auxiliary_losses(config: Any, num_microbatches: int, device: torch.device) -> None:
    """Losses that are attached to the graph and not returned must be scaled as the returned one is."""
    for option, module, scaler, uses_context in (
        ("num_moe_experts", "transformer.moe.router", "MoEAuxLossAutoScaler", True),
        ("mtp_num_layers", "transformer.multi_token_prediction", "MTPLossAutoScaler", False),
    ):
        if getattr(config, option, None) is None or (loaded := _loaded(module)) is None:
            continue
        scale = torch.ones(1, device=device)
        if config.grad_scale_func is not None:
            scale = config.grad_scale_func(scale)
        if not config.calculate_per_token_loss:
            if uses_context:
                scale = scale * config.context_parallel_size
            scale = scale / num_microbatches
        getattr(loaded, scaler).set_loss_scale(scale)


hooks.find_groups.append(_groups)
hooks.check_config.append(_check_config)
hooks.around_forwards.append(_around_forwards)


# Building the chunks of a rank


def build_model_chunks(model_provider: Callable[..., nn.Module], schedule: str | Schedule) -> list[nn.Module]:
    """The chunks that this rank holds under `schedule`, made by a Megatron model provider.

    Args:
        model_provider: called as `model_provider(pre_process=..., post_process=..., vp_stage=...)` for each chunk. The
            config must have `virtual_pipeline_model_parallel_size` set to the number of chunks, or None for one.

    Megatron numbers a chunk's layers by its rank's place in the pipeline. Under V placement every other chunk runs the
    other way, so for those the rank's place is shown to the provider, and to the chunk ever after, as it is there.
    """
    parallel_state = sys.modules["megatron.core.parallel_state"]
    stages = stages_for_rank(schedule)
    virtual_size = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if virtual_size != len(stages):
        raise ValueError(
            f"{find_schedule(schedule).name} runs {len(stages)} chunk(s) on each rank, but Megatron was initialised "
            f"with virtual_pipeline_model_parallel_size={virtual_size} and would cut the model for that: initialise it "
            f"with {len(stages) if len(stages) > 1 else None}."
        )
    pp_size = stages[0].num_stages // len(stages)
    chunks = []
    for vp_stage, stage in enumerate(stages):
        with _pretend_rank(parallel_state, stage.index % pp_size):
            chunk = model_provider(
                pre_process=stage.is_first,
                post_process=stage.is_last,
                vp_stage=vp_stage if len(stages) > 1 else None,
            )
        chunks.append(chunk)
    return chunks


class _GroupSeenFrom:
    """A process group as one of its other ranks sees it."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def _pretend_rank(parallel_state: Any, rank: int) -> Any:
    group = parallel_state.get_pipeline_model_parallel_group()
    if rank == group.rank():
        yield
        return
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = _GroupSeenFrom(group, rank)
    parallel_state.set_pipeline_model_parallel_rank(rank)
    try:
        yield
    finally:
        parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = group
        parallel_state.set_pipeline_model_parallel_rank(None)


# Layers that leave their weight gradients to W


def put_off_weight_gradients(module: Module) -> Module:
    """Make the layers that Megatron builds without transformer-engine leave their weight gradients to W: its
    ColumnParallelLinear and RowParallelLinear, as `weight_grad.convert` does with torch's. Call it before the model is
    wrapped or after.

    Returns `module`. A layer's class is swapped and nothing else. Under tensor parallelism a layer whose backward
    communicates between its two products (a ColumnParallelLinear, or any with sequence parallelism) stays as it is:
    what Megatron hides there is its weight gradient.
    """
    layers = sys.modules["megatron.core.tensor_parallel.layers"]
    for layer in module.modules():
        original: Any = type(layer)
        if original in (layers.ColumnParallelLinear, layers.RowParallelLinear):
            layer.__class__ = _deferring_class(original)
    return module


@functools.cache
def _deferring_class(original: Any) -> Any:
    def _forward_impl(self: Any, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if options["allreduce_dgrad"] or options["sequence_parallel"]:
            return original._forward_impl(self, input, weight, **options)  # type: ignore[no-any-return]
        return linear(input, weight, options["bias"])

    return type(original.__name__, (original,), {"__module__": original.__module__, "_forward_impl": _forward_impl})


# Functions that trainers import from Megatron's schedules, with Megatron's arguments


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: nn.Module,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int = 1,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, Tensor]:
    """One forward, outside any schedule. Returns the output (on the last stage the loss) and the number of tokens."""
    step = StepArguments(
        forward_step_func,
        [data_iterator],
        [model],
        num_microbatches,
        PipelineConfig.of(config, context_parallel_size=cp_group_size),
        next((p.device for p in model.parameters()), torch.device("cpu")),
        collect_non_loss_data=collect_non_loss_data,
        needs_loss=False,
        results=forward_data_store,
    )
    stage = Stage(StageInfo(0, 1 if is_last_stage else 2), 0, step, None)
    is_list = isinstance(input_tensor, list)
    extra = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
    stage.set_input(input_tensor if is_list else [input_tensor])
    output, loss = stage.run(current_microbatch or 0, *extra, is_first_microbatch=is_first_microbatch)
    output = output if loss is None else loss
    return [output] if is_list else output, step.num_tokens


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any = None, config: Any = None
) -> Any:
    """One backward, outside any schedule. Returns the gradient of the input, or the list of them for a list."""
    inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
    outputs = output_tensor if isinstance(output_tensor, list) else [output_tensor]
    grads = output_tensor_grad if isinstance(output_tensor_grad, list) else [output_tensor_grad]
    for tensor in inputs:
        if tensor is not None:
            tensor.retain_grad()
    scale = getattr(config, "grad_scale_func", None)
    if grads[0] is None and scale is not None:
        outputs[0] = scale(outputs[0])
    if outputs[0].requires_grad:
        custom_backward(outputs[0], grads[0])
    input_grads = [None if tensor is None else tensor.grad for tensor in inputs]
    return input_grads if isinstance(input_tensor, list) else input_grads[0]


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Backward of an output whose data may have been freed."""
    run_backward(
        [torch.autograd.graph.get_gradient_edge(output)],
        [torch.ones_like(output) if grad_output is None else grad_output],
    )


def deallocate_output_tensor(out: Tensor | None, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the data of a sent output and keep its graph. Schedules here do not need it: they keep the graph only."""
    if out is not None and deallocate_pipeline_outputs:
        out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def get_tensor_shapes(
    *,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None,
    config: Any,
    tp_group: Any,
    cp_group: Any,
) -> list[tuple[int, ...]]:
    """The shapes of the tensors between stages: one, sequence first, and only this rank's part of it."""
    length = (seq_length if decoder_seq_length is None else decoder_seq_length) // cp_group.size()
    if config.sequence_parallel:
        length //= tp_group.size()
    return [(length, micro_batch_size, config.hidden_size)]


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """The forwards of a rank in interleaved order, as (microbatch, chunk)."""
    size = microbatch_group_size_per_vp_stage
    return [
        (microbatch, chunk)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_model_chunks)
        for microbatch in range(first, min(first + size, num_microbatches))
    ]
