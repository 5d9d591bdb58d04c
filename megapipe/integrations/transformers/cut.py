"""Take out of a model what belongs to other stages.

What stays is at its old place, so layers keep their numbers, and with them their names in checkpoints and their kind of
attention. The model's own forward then runs on what is left. What the modules taken out would have computed is either
not read on this stage, or replaced by what the stage has received (see `crossing`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Absent", "AbsentLayer", "CannotCutError", "Parts", "cut", "find_parts"]


class CannotCutError(ValueError):
    """A model that cannot be cut into stages."""


class Absent(nn.Module):
    """Stands where a module of another stage was, and hands on what it is called with first."""

    def forward(self, first: Any = None, *others: Any, **options: Any) -> Any:
        return next(iter(options.values()), None) if first is None else first


class AbsentWeights(Absent):
    """Returns zeros where an embedding or a linear layer was."""

    weight: Tensor

    def __init__(self, module: nn.Module, width: int, weight: Tensor) -> None:
        super().__init__()
        self.keeps = 0 if isinstance(module, nn.Embedding) else 1
        self.width = width
        self.register_buffer("weight", weight.new_empty(1, 1), persistent=False)  # some look at its device
        self.register_buffer("bias", weight.new_empty(1), persistent=False)  # nn.MultiheadAttention writes into it

    def forward(self, first: Any = None, *others: Any, **options: Any) -> Tensor:
        given: Tensor = next(iter(options.values())) if first is None else first
        sizes = given.shape[: given.dim() - self.keeps]
        return torch.zeros(*sizes, self.width, dtype=self.weight.dtype, device=given.device)


class AbsentLayer(Absent):
    """Stands where a layer of another stage was.

    Attributes:
        call: computes what it returns of its number and its arguments.
    """

    def __init__(self, layer: nn.Module, number: int, call: Callable[[int, inspect.BoundArguments], Any]) -> None:
        super().__init__()
        self.kind = type(layer)
        for name, value in vars(layer).items():
            if name not in self.__dict__ and not isinstance(value, nn.Module):
                self.__dict__[name] = value
        self.number, self.call, self.signature = number, call, inspect.signature(layer.forward)

    def __getattr__(self, name: str) -> Any:
        """Such as attention_type, which decoders look at."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["kind"], name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.call(self.number, self.signature.bind(*arguments, **options))


class Parts(NamedTuple):
    """The places in a model of its layers and of what computes them."""

    decoder: str
    """The child of the model that makes hidden states of tokens."""
    layers: str
    """The list of layers, from the model on: "model.layers"."""

    def decoder_of(self, model: nn.Module) -> Any:
        return getattr(model, self.decoder)

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    def layer_of(self, name: str) -> int | None:
        """Which layer a parameter of this name is in; None for those outside."""
        prefix = f"{self.layers}."
        return int(name[len(prefix) :].split(".")[0]) if name.startswith(prefix) else None


def find_parts(model: Any) -> Parts:
    """The list with the most weights is that of the layers, first of those with as many as the config says.

    Raises:
        CannotCutError: there is no such list.
    """
    lists = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and "." in name
    }
    wanted = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    decoder = model.get_decoder()
    inner = {name: one for name, one in lists.items() if any(one is module for module in decoder.modules())}
    lists = inner or lists
    candidates = {name: one for name, one in lists.items() if len(one) == wanted} or lists
    if not candidates:
        raise CannotCutError(f"{type(model).__name__} cannot be cut into stages: it has no list of layers.")
    sizes = {name: sum(p.numel() for p in one.parameters()) for name, one in candidates.items()}
    name = max(sizes, key=lambda one: sizes[one])
    return Parts(name.split(".")[0], name)


def cut(model: nn.Module, parts: Parts, is_kept: Callable[[str], bool], prefix: str = "") -> None:
    """Leave in `model`, outside its layers, the parameters that `is_kept` by their names. Layers are left alone."""
    for name, child in list(model.named_children()):
        path = f"{prefix}{name}"
        own = [is_kept(f"{path}.{one}") for one, _ in child.named_parameters(remove_duplicate=False)]
        if path == parts.layers or (all(own) and not f"{parts.layers}.".startswith(f"{path}.")):
            continue
        weight = getattr(child, "weight", None)
        if any(own) or f"{parts.layers}.".startswith(f"{path}."):
            cut(child, parts, is_kept, f"{path}.")
        elif isinstance(child, nn.Embedding):
            setattr(model, name, AbsentWeights(child, child.embedding_dim, child.weight))
        elif isinstance(child, nn.Linear):
            setattr(model, name, AbsentWeights(child, child.out_features, child.weight))
        elif list(child.children()) and weight is None:
            cut(child, parts, is_kept, f"{path}.")
        else:
            setattr(model, name, Absent())
    for name, parameter in list(model.named_parameters(recurse=False)):
        if not is_kept(f"{prefix}{name}"):
            delattr(model, name)
            model.register_buffer(name, torch.zeros_like(parameter), persistent=False)
