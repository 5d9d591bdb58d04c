"""Heads of one's own, in the place of the one that gives scores."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from .boundaries import CannotCutError
from .whole_model import classifier_of, make_meta_model


def let_score(config: Any, head: nn.Module) -> None:
    """Let a config be of a model whose head can be replaced: the one that gives as many scores to each token, where it
    names no class with scores.

    Raises:
        CannotCutError: transformers has no such class.
        ValueError: the head does not take hidden states.
    """
    if classifier_of(config) is None:
        known = importlib.import_module("transformers").MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING
        if type(config) not in known:
            raise CannotCutError(
                f"a head of one's own takes the place of that of a class for scores, and transformers has none for "
                f"{type(config).__name__}: write its stages (docs/own_model.md)."
            )
        config.architectures = [known[type(config)].__name__]
    width, like = config.get_text_config().hidden_size, next(head.parameters(), torch.empty(0))
    hidden = torch.zeros(1, 2, width, dtype=like.dtype, device=like.device)
    returned: Any
    try:
        with torch.no_grad():
            returned = list(copy.deepcopy(head).eval()(hidden).shape)
    except Exception as error:
        returned = f"{type(error).__name__}: {error}"
    if returned[:2] != [1, 2] or len(returned) != 3:
        raise ValueError(
            f"head is to return [sequences, tokens, labels] of hidden states [sequences, tokens, {width}], and for "
            f"[1, 2, {width}] there came {returned}."
        )
    config.num_labels = returned[2]


def name_of_head(model: Any, decoder: str) -> str:
    """What a model with scores calls its head: what has weights beside the decoder."""
    others = [name for name, child in model.named_children() if name != decoder]
    return str(next(name for name in others if any(True for _ in model.get_submodule(name).parameters())))


def is_of_own_head(chunk: Any, name: str) -> bool:
    """Whether a tensor of this name in a chunk belongs to the head of one's own."""
    return chunk.config.head is not None and not name.startswith(f"{chunk.parts.decoder}.")


def whole_of(chunk: Any, dtype: torch.dtype) -> Any:
    """The whole model, on the meta device, of which this is a chunk."""
    whole = make_meta_model(copy.deepcopy(chunk.config.model_config), dtype)
    if chunk.config.head is not None:
        setattr(whole, name_of_head(whole, chunk.parts.decoder), copy.deepcopy(chunk.config.head).to("meta", dtype))
    return whole


def put_head(chunk: Any, device: torch.device | str) -> None:
    """Give the last stage the head of one's own, with the weights that it came with."""
    if chunk.config.head is not None and chunk.stage.is_last:
        own = copy.deepcopy(chunk.config.head).to(device, chunk.dtype)
        setattr(chunk, name_of_head(chunk, chunk.parts.decoder), own)
