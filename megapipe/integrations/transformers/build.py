"""Chunks of a model of transformers: made without memory, cut, and then given memory for what is left."""

from __future__ import annotations

import copy
import functools
import importlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...layouts import distribute_layers
from ...plan import StageInfo
from ...runtime import stages_for_rank
from ...weight_grad import let_convert, transposed_linear
from . import experts
from .boundaries import Crossing
from .cut_check import check_cut
from .data_flow import Flow
from .heads import let_score, put_head
from .in_memory import config_and_dtype, copy_model
from .stage import ChunkConfig, as_stage
from .step import tie_weights
from .whole_model import allocate, check_kind, has_towers, initialise, keep_in_float32, make_meta_model


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
    experts_implementation: str | None = None,
    example: Mapping[str, Any] | None = None,
    text_only: bool = False,
    head: nn.Module | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> list[Any]:
    """This rank's chunks of a decoder with a head, for a schedule. Every rank calls it, after
    `parallel_state.initialize_model_parallel`. The head is the one that the config's `architectures` names: for the
    next token, or for a score of each token (`...ForTokenClassification`) or sequence (`...ForSequenceClassification`).

    Only what a rank holds is ever in its memory. Each chunk is a model of its own class and a `HuggingFaceStage`, has
    the whole model's names, and for its config a `ChunkConfig`, which all chunks share.

    Args:
        model: a folder with a config.json, or a config of transformers. Or a model in memory, with adapters of `peft`
            or without: its weights are copied, and what is frozen stays so.
        schedule: its name, or what `get_forward_backward_func` returned.
        num_chunks: per rank, where the schedule leaves that open.
        num_virtual_layers_pre, num_virtual_layers_post, layout, costs: which layers a stage gets, as
            `distribute_layers` takes them: as many as others, as many as a layout says, or by what layers cost.
        dtype: of the weights; None takes the model's, the config's, or float32.
        device: None takes the current CUDA device with NCCL, otherwise the CPU. "meta" leaves chunks without memory,
            which `load_weights` gives to one layer after the other.
        seed: new weights are drawn from it and their names, so that they are the same however the model is cut. None
            leaves them undefined, for `load_weights`. Of no meaning for a model in memory.
        attn_implementation: as in transformers.
        experts_implementation: as in transformers, or "megapipe", which leaves the experts' weight gradients to W.
        example: of a model with towers for images, a microbatch with some, as the whole model is called with it. The
            towers are on the first stage, and so are pixels read there alone.
        text_only: leave out what only reads images: its weights are neither read nor written.
        head: of one's own, for scores of tokens or sequences: it is called with hidden states [sequences, tokens,
            hidden_size], and what it returns are the logits. Where the config names no class for scores, it becomes
            the model's `...ForTokenClassification`, whose own head it replaces, under its name. The last stage gets a
            copy, with the weights that are in it: the same on all ranks.
        trust_remote_code: run the code of a model that is in its folder.
        settings: fields of `PipelineConfig`.

    Raises:
        CannotCutError: a ValueError, for models that are no such decoders, or whose weights are quantised.
        ValueError: layers cannot be shared out like that, or a setting is wrong.
    """
    if is_meta(device) and seed is not None:
        raise ValueError("device='meta' has no memory for new weights: take seed=None, and call load_weights.")
    let_convert_conv1d()
    if (whole := model if isinstance(model, nn.Module) else None) is not None:
        model, of_whole = config_and_dtype(whole, head)
        dtype, seed = dtype or of_whole, None
    config = copy.deepcopy(_read_config(model, trust_remote_code))  # transformers writes into it
    if head is not None:
        let_score(config, head)
    _check_config(config, is_text=example is None and not text_only)
    if experts_implementation is not None:
        experts.register()
        config._experts_implementation = experts_implementation
    dtype = dtype or config.dtype or torch.float32
    settings = {"hidden_size": config.get_text_config().hidden_size, "calculate_per_token_loss": True, **settings}
    chunk_config = ChunkConfig(config, copy.deepcopy(head), **settings)
    ends = num_virtual_layers_pre, num_virtual_layers_post
    own = stages_for_rank(schedule, num_chunks=num_chunks)
    stages = [StageInfo(index, own[0].num_stages) for index in range(own[0].num_stages)]
    num_layers = config.get_text_config().num_hidden_layers
    layers = [distribute_layers(num_layers, stage, *ends, layout=layout, costs=costs) for stage in stages]
    checked = check_cut(config, layers, example, text_only)
    chunks = []
    for stage in own:
        made = make_meta_model(config, dtype, attn_implementation)
        chunk = _make_chunk(made, stage, layers[stage.index], checked.flow, device or default_device(), seed)
        chunk.config, chunk.takes_mean = chunk_config, checked.takes_mean
        put_head(chunk, device or default_device())
        if whole is not None:
            copy_model(whole, chunk)
        chunks.append(chunk)
    if not is_meta(device):
        tie_weights(chunks)
    return chunks


def is_meta(device: torch.device | str | None) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _read_config(model: Any, trust_remote_code: bool) -> Any:
    if not isinstance(model, (str, os.PathLike)):
        return model
    transformers: Any = importlib.import_module("transformers")
    config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    if trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        with torch.device("meta"):  # transformers then knows the class by the config's
            transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=True)
    return config


def _check_config(config: Any, is_text: bool) -> None:
    check_kind(config)
    if is_text and has_towers(config):
        raise ValueError(
            f"{type(config).__name__} has towers for other things than text: pass a microbatch with images as example, "
            "or text_only=True."
        )


def default_device() -> torch.device:
    if torch.distributed.is_initialized() and "nccl" in torch.distributed.get_backend():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _make_chunk(
    model: Any, stage: StageInfo, layers: range, flow: Flow | None, device: torch.device | str, seed: int | None
) -> Any:
    if flow is None:
        as_stage(model, stage, layers)
    else:
        as_stage(model, stage, layers, flow.course, Crossing(flow.borders[stage.index], layers, flow.course.forms))
    model.flow = flow
    keep_in_float32(model)
    allocate(model, device)
    initialise(model, seed)
    model.is_drawn = seed is not None
    if model.routers is not None:
        # Now, and not in the first forward: that may be one of several by which a graph is made.
        recording: Any = importlib.import_module("transformers.utils.output_capturing")
        recording.maybe_install_capturing_hooks(model.parts.decoder_of(model))
    return model.train()


@functools.cache
def let_convert_conv1d() -> None:
    """Let `weight_grad.convert` know transformers' Conv1D: GPT-2's linear layer, whose weights are [in, out]."""
    original: Any = importlib.import_module("transformers.pytorch_utils").Conv1D

    def forward(self: Any, x: Tensor) -> Tensor:
        return transposed_linear(x, self.weight, self.bias)

    members = {"__module__": original.__module__, "forward": forward}
    let_convert(original, type(original.__name__, (original,), members))
