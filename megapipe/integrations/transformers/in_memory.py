"""What chunks take over from a whole model in memory."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from .heads import is_of_own_head
from .whole_model import make_meta_model


def config_and_dtype(whole: Any, head: nn.Module | None = None) -> tuple[Any, torch.dtype]:
    """What chunks are made from.

    Args:
        head: of one's own, for which the model may be of a class of one's own, that differs in nothing else.

    Raises:
        ValueError: where they would be of another model than this one.
    """
    base = _base_of(whole)
    if not hasattr(base, "config") or not hasattr(base, "dtype"):
        raise ValueError(
            f"build_chunks takes models of transformers, got a {type(whole).__name__}: try megapipe.split."
        )
    made = type(make_meta_model(copy.deepcopy(base.config), base.dtype))
    has_own = head is not None and isinstance(base, made) and type(base).forward is made.forward
    if type(base) is not made and not has_own:
        raise ValueError(
            f"the model is a {type(base).__name__}, but its config makes a {made.__name__}, which chunks would be: "
            "write its stages (docs/own_model.md), or build chunks from its config, if only the head differs with head."
        )
    return base.config, base.dtype


def copy_model(whole: Any, chunk: Any) -> None:
    """Weights, adapters, what is frozen, and settings of generation. A head of one's own has come with all of that."""
    base = _base_of(whole)
    for name, adapter in getattr(whole, "peft_config", {}).items():
        chunk.add_adapter(adapter, name)
    if chunk.can_generate():
        chunk.generation_config = copy.deepcopy(base.generation_config)
    tensors = base.state_dict()
    taken = [name for name in chunk.state_dict() if not is_of_own_head(chunk, name)]
    chunk.load_state_dict({**chunk.state_dict(), **{name: tensors[name] for name in taken}})
    trained = {name: parameter.requires_grad for name, parameter in _parameters(base).items()}
    for name, parameter in _parameters(chunk).items():
        if not is_of_own_head(chunk, name):
            parameter.requires_grad_(trained[name])


def _base_of(whole: Any) -> Any:
    """The model of transformers in a PeftModel."""
    return whole.get_base_model() if hasattr(whole, "get_base_model") else whole


def _parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))
