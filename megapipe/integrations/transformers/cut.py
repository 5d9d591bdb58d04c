"""Take out of a model what belongs to other stages.

A layer of another stage becomes one that hands on its input, at its old place: all others keep their numbers, and with
them their names in checkpoints and their kind of attention. The model's own forward then runs on what is left.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...plan import StageInfo

__all__ = ["Absent", "CannotCutError", "Parts", "cut", "find_parts"]

MULTIPLIERS = ("embedding_multiplier",)
"""Numbers by which decoders multiply embeddings, also those that they are given."""


class CannotCutError(ValueError):
    """A model that cannot be cut into stages."""


class Absent(nn.Module):
    """Stands where a module of another stage was, and hands on what it is called with first."""

    def forward(self, first: Any = None, *others: Any, **options: Any) -> Any:
        return first


class NoPositions(nn.Module):
    """Stands for embeddings of positions behind the first stage, which has added them."""

    def forward(self, position_ids: Tensor) -> Tensor:
        return torch.zeros((), device=position_ids.device)


class Parts(NamedTuple):
    """The names of children, in a model with a head and in its decoder."""

    decoder: str
    """The part of the model that makes hidden states of tokens, or of hidden states."""
    heads: list[str]
    """The part of the model behind the decoder."""
    before: list[str]
    """Embeddings of the decoder, and their dropout."""
    layers: str
    """The decoder's layers."""
    behind: list[str]
    """The decoder's norm behind the layers."""

    def decoder_of(self, model: nn.Module) -> Any:
        return getattr(model, self.decoder)

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers: nn.ModuleList = getattr(self.decoder_of(model), self.layers)
        return layers

    def layer_of(self, name: str) -> int | None:
        """Which layer a parameter of this name is in; None for those outside."""
        prefix = f"{self.decoder}.{self.layers}."
        return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


def find_parts(model: Any) -> Parts:
    """Raises CannotCutError where the model is not made of embeddings, a list of layers, a norm and a head."""
    name, config = type(model).__name__, model.config
    embedding = model.get_input_embeddings()
    for decoder_name, decoder in model.named_children():
        children = dict(decoder.named_children())
        lists = [n for n, child in children.items() if _is_layers(child, config.num_hidden_layers)]
        if embedding in children.values() and len(lists) == 1:
            # Rotary embeddings are computed on every stage.
            names = [n for n, child in children.items() if "Rotary" not in type(child).__name__]
            place = names.index(lists[0])
            heads = [n for n, _ in model.named_children() if n != decoder_name]
            return Parts(decoder_name, heads, names[:place], lists[0], names[place + 1 :])
    raise CannotCutError(
        f"{name} cannot be cut into stages: it is not made of embeddings, one list of layers, a norm and a head."
    )


def _is_layers(child: nn.Module, num_layers: int) -> bool:
    return isinstance(child, nn.ModuleList) and len(child) == num_layers


def cut(model: Any, parts: Parts, stage: StageInfo, layers: range, keep_embedding: bool = False) -> None:
    """Leave in `model` what belongs to `stage`, and of its layers those with the numbers `layers`.

    Args:
        keep_embedding: also behind the first stage.
    """
    decoder, all_layers = parts.decoder_of(model), parts.layers_of(model)
    for number in range(len(all_layers)):
        if number not in layers:
            all_layers[number] = Absent()
    if not stage.is_first:
        embedding = model.get_input_embeddings()
        for name in parts.before:
            child = getattr(decoder, name)
            if child is embedding and keep_embedding:
                continue
            adds_positions = isinstance(child, nn.Embedding) and child is not embedding
            setattr(decoder, name, NoPositions() if adds_positions else Absent())
        for name in MULTIPLIERS:
            if hasattr(decoder, name):
                setattr(decoder, name, 1.0)
    if not stage.is_last:
        for owner, names in ((decoder, parts.behind), (model, parts.heads)):
            for name in names:
                setattr(owner, name, Absent())
