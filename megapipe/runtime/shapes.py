"""Finds the shapes of messages before a step, from the arguments or from the model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..chunks import find_attribute
from ..config import check_whole_number
from ..messages import MessageSpec, TensorSpec, can_have_gradient, pack
from ..plan import StageInfo
from ..stages import Call


def message_specs(model: nn.Module, stage: StageInfo, call: Call) -> tuple[MessageSpec | None, MessageSpec | None]:
    """The messages that `stage` receives and sends, or None for both where neither the model nor the arguments tell. At
    the ends of the pipeline one of them is unused.

    The model decides where it has `infer_stage_inputs_from_pipeline_inputs(inputs, n_microbatches)` and
    `infer_stage_outputs_from_pipeline_inputs(inputs, n_microbatches)`. They are called on the meta device, in every
    step, and return a tensor, or a list, tuple or dict of tensors, of which only shapes and dtypes matter. Of their
    floating-point and complex tensors all have gradients, unless some are marked by `requires_grad`: then only those.

    Both may return None, where `inputs` does not tell.

    Raises:
        ValueError: for sizes that cannot be.
        TypeError: where the model tells something that cannot be sent.
    """
    infer_inputs = find_attribute(model, "infer_stage_inputs_from_pipeline_inputs")
    infer_outputs = find_attribute(model, "infer_stage_outputs_from_pipeline_inputs")
    if infer_inputs is not None and infer_outputs is not None:
        inputs = _pipeline_inputs(call)
        with torch.device("meta"):
            received = infer_inputs(inputs, call.num_microbatches)
            sent = infer_outputs(inputs, call.num_microbatches)
        if received is None and sent is None:
            return None, None
        return (
            spec_of(received, "infer_stage_inputs_from_pipeline_inputs must return", stage.is_first),
            spec_of(sent, "infer_stage_outputs_from_pipeline_inputs must return", stage.is_last),
        )
    shape = None if find_attribute(model, "finds_shapes") else _tensor_shape(call)
    if shape is None:
        return None, None
    dtype = call.config.pipeline_dtype or _dtype_of(model)
    receive_shapes, send_shapes = [shape], [shape]
    if call.adjust_tensor_shapes_fn is not None:
        receive_shapes, send_shapes = call.adjust_tensor_shapes_fn(receive_shapes, send_shapes)
    return _spec_of_shapes(receive_shapes, dtype), _spec_of_shapes(send_shapes, dtype)


def _pipeline_inputs(call: Call) -> Any:
    """The inputs of one step of the whole pipeline, as tensors on the meta device."""
    if call.pipeline_inputs is not None:
        return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), call.pipeline_inputs)
    if call.seq_length is None or call.micro_batch_size is None:
        return {}
    batch_size = call.micro_batch_size * call.num_microbatches
    return {"input_ids": torch.empty(batch_size, call.seq_length, dtype=torch.long, device="meta")}


def spec_of(message: Any, what_must: str, is_end: bool = False) -> MessageSpec:
    """The spec of a message like this one.

    Args:
        what_must: the beginning of the error text.
        is_end: the stage is the first or last, and there is no message at that side.
    """
    try:
        structure, tensors = pack(message)
    except TypeError as error:
        if is_end:  # nothing travels there, so the model may say anything
            return MessageSpec("list", ())
        raise TypeError(f"{what_must} a tensor, or a list, tuple or dict of tensors: {error}.") from None
    marked = any(t.requires_grad for t in tensors)
    return MessageSpec(
        structure,
        tuple(
            TensorSpec(tuple(t.shape), t.dtype, t.requires_grad if marked else can_have_gradient(t.dtype))
            for t in tensors
        ),
    )


def _spec_of_shapes(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> MessageSpec:
    tensors = tuple(TensorSpec(tuple(shape), dtype, can_have_gradient(dtype)) for shape in shapes)
    return MessageSpec("tensor" if len(tensors) == 1 else "list", tensors)


def _tensor_shape(call: Call) -> tuple[int, ...] | None:
    """Megatron's: sequence first, and only this rank's part of it. None where the sizes are not said."""
    config = call.config
    for name in ("seq_length", "micro_batch_size", "decoder_seq_length"):
        if getattr(call, name) is not None:
            check_whole_number(name, getattr(call, name), 1)
    if config.hidden_size is None or call.seq_length is None or call.micro_batch_size is None:
        if call.adjust_tensor_shapes_fn is None:
            return None
        raise ValueError(
            "adjust_tensor_shapes_fn is to adjust a shape that is not known: it takes seq_length and micro_batch_size "
            f"(got {call.seq_length} and {call.micro_batch_size}) and model.config.hidden_size "
            f"({config.hidden_size}). Pass them, or pass no adjust_tensor_shapes_fn."
        )
    seq_length = call.decoder_seq_length or call.seq_length
    num_parts = config.context_parallel_size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
    if seq_length % num_parts:
        raise ValueError(
            f"a sequence of {seq_length} cannot be shared by {num_parts} ranks (context_parallel_size "
            f"{config.context_parallel_size}, sequence_parallel {config.sequence_parallel}, tensor_model_parallel_size "
            f"{config.tensor_model_parallel_size}): choose a seq_length that is a multiple of {num_parts}."
        )
    return seq_length // num_parts, call.micro_batch_size, config.hidden_size


def _dtype_of(model: nn.Module) -> torch.dtype:
    dtype = None
    if "torch.distributed.fsdp" in sys.modules:
        from ..sharding import output_dtype

        dtype = output_dtype(model)
    return dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
