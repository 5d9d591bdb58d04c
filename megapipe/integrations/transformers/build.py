"""Chunks of a model of transformers: made without memory, cut, and then given memory for what is left."""

from __future__ import annotations

import copy
import importlib
import os
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ...plan import StageInfo, distribute_layers
from ...runtime import stages_for_rank
from .config import ChunkConfig
from .conv1d import let_convert_conv1d
from .cut import CannotCutError, check_cut, cut, find_parts
from .sliced import IMPLEMENTATION, register
from .stage import as_stage, find_routers
from .step import tie_weights

__all__ = ["build_chunks", "make_meta_model"]


def build_chunks(
    model: Any,
    schedule: Any,
    *,
    num_chunks: int | None = None,
    num_virtual_layers_pre: float = 0,
    num_virtual_layers_post: float = 0,
    layout: str | Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seed: int | None = 0,
    attn_implementation: str | None = None,
    **settings: Any,
) -> list[Any]:
    """This rank's chunks of a decoder with a head, for a schedule. Every rank calls it, after
    `parallel_state.initialize_model_parallel`.

    Only what a rank holds is ever in its memory. Each chunk is a model of its own class and a `HuggingFaceStage`, has
    the whole model's names, and for its config a `ChunkConfig`, which all chunks share.

    Args:
        model: a folder with a config.json, or a config of transformers.
        schedule: its name, or what `get_forward_backward_func` returned.
        num_chunks: per rank, where the schedule leaves that open.
        num_virtual_layers_pre, num_virtual_layers_post, layout, costs: which layers a stage gets, as
            `distribute_layers` takes them: as many as others, as many as a layout says, or by what layers cost.
        dtype: of the weights; None takes the config's, or float32.
        device: None takes the current CUDA device with NCCL, otherwise the CPU.
        seed: new weights are drawn from it and their names, so that they are the same however the model is cut. None
            leaves them undefined, for `load_weights`.
        attn_implementation: as in transformers.
        settings: fields of `PipelineConfig`.

    Raises:
        CannotCutError: a ValueError, for models that are no such decoders.
        ValueError: layers cannot be shared out like that, or a setting is wrong.
    """
    let_convert_conv1d()
    config = copy.deepcopy(_read_config(model))  # transformers writes into it
    dtype = dtype or config.dtype or torch.float32
    settings = {"hidden_size": config.get_text_config().hidden_size, "calculate_per_token_loss": True, **settings}
    chunk_config = ChunkConfig(config, **settings)
    if chunk_config.num_sequence_slices > 1:
        register()
        attn_implementation = IMPLEMENTATION
    ends = num_virtual_layers_pre, num_virtual_layers_post
    chunks = []
    for stage in stages_for_rank(schedule, num_chunks=num_chunks):
        whole = make_meta_model(config, dtype, attn_implementation)
        layers = distribute_layers(config.num_hidden_layers, stage, *ends, layout=layout, costs=costs)
        chunk = _make_chunk(whole, stage, layers, device or _default_device(), seed)
        chunk.config = chunk_config
        chunks.append(chunk)
    tied = tie_weights(chunks)
    if tied is not None and chunk_config.finalize_model_grads_func is None:
        chunk_config.finalize_model_grads_func = tied.sum_gradients
    return chunks


def _read_config(model: Any) -> Any:
    if isinstance(model, (str, os.PathLike)):
        return importlib.import_module("transformers").AutoConfig.from_pretrained(model)
    return model


def make_meta_model(config: Any, dtype: torch.dtype, attn_implementation: str | None = None) -> Any:
    """The whole model, on the meta device. Raises CannotCutError where the config is of no decoder with a head."""
    transformers: Any = importlib.import_module("transformers")
    name = type(config).__name__.removesuffix("Config")
    if config.is_encoder_decoder:
        raise CannotCutError(f"{name} cannot be cut into stages: it has an encoder besides its decoder.")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise CannotCutError(f"{name} cannot be cut into stages: it is no decoder with a head for the next token.")
    if config.get_text_config(decoder=True) is not config:
        raise CannotCutError(
            f"{name} cannot be cut into stages: it has towers for other things than text. Take its text model, whose "
            "config is config.get_text_config()."
        )
    options = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, **options)


def _default_device() -> torch.device:
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _make_chunk(model: Any, stage: StageInfo, layers: range, device: torch.device | str, seed: int | None) -> Any:
    parts, dtype = find_parts(model), model.dtype
    routers = find_routers(parts, parts.decoder_of(model), layers)
    cut(model, parts, stage, layers)
    model.to_empty(device=device)
    if stage.is_first and stage.is_last:
        model.tie_weights()
    _initialise(model, seed)
    has_weights = any(True for _ in model.parameters())
    stands_in = None if has_weights else torch.empty(0, dtype=dtype, device=device)
    as_stage(model, stage, layers, parts, routers, stands_in)
    if not stage.is_first:
        check_cut(model, parts)
    if routers is not None:
        # Now, and not in the first forward: that may be one of several by which a graph is made.
        recording: Any = importlib.import_module("transformers.utils.output_capturing")
        recording.maybe_install_capturing_hooks(parts.decoder_of(model))
    return model.train()


def _initialise(model: Any, seed: int | None) -> None:
    """As the model does it by itself, module by module, each with its own seed; without a seed only its buffers."""
    for tensor in model.parameters():
        tensor._is_hf_initialized = seed is None  # which transformers then leaves alone
    with torch.random.fork_rng(devices=_devices(model)), torch.no_grad():
        for name, module in reversed(list(model.named_modules())):  # those within a module come first
            torch.manual_seed(((seed or 0) + zlib.crc32(name.encode())) % 2**63)
            model._init_weights(module)
    for tensor in model.parameters():
        del tensor._is_hf_initialized


def _devices(model: nn.Module) -> list[torch.device]:
    return [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
