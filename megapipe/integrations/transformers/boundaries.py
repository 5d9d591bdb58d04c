"""What is taken out of a model, and what crosses the boundaries of a stage instead.

What stays is at its old place, so layers keep their numbers, and with them their names in checkpoints and their kind of
attention. The model's own forward then runs on what is left. What the modules taken out would have computed is either
not read on this stage, or replaced by what the stage has received.

Layers are called by the model's own code, in its own loop. Where the first layer of a stage is called, it is given what
the stage has received instead of what the code before it has made of nothing. Where the first layer behind the stage
would be called, its arguments are what the stage hands on, and the forward ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


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


class ModelParts(NamedTuple):
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


def find_parts(model: Any) -> ModelParts:
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
    return ModelParts(name.split(".")[0], name)


def cut(model: nn.Module, parts: ModelParts, is_kept: Callable[[str], bool], prefix: str = "") -> None:
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


# What crosses

FIRST = "the first argument"
"""Stands in the form of what a layer returns for a tensor of the shape of its first argument."""

Path = tuple[Any, ...]
"""Keys and indices that lead to a tensor within a layer's arguments, or within what the last layer returns."""


class Place(NamedTuple):
    """Where a tensor is read: in the arguments of a layer, or behind the last one in what it returns."""

    layer: int
    path: Path


@dataclass(frozen=True)
class Border:
    """Which tensors a stage receives and hands on, by their names in messages."""

    takes: dict[str, list[Place]] = field(default_factory=dict)
    """Where its own layers read what it receives."""
    gives: dict[str, Place] = field(default_factory=dict)
    """Where what it computes is to be had."""
    passes: list[str] = field(default_factory=list)
    """What it receives and hands on."""


class Reached(BaseException):
    """Ends a forward: all that is to be handed on is there. No code that looks for errors should catch it."""


class Crossing:
    """The border of one stage at work. It holds tensors only during a forward.

    Args:
        layers: the numbers of the stage's own.
        forms: what each layer of the whole model returns, in which `FIRST` stands for tensors like its first argument.
    """

    is_everywhere = False
    """Whether all own layers are to be entered, whatever the border says."""

    def __init__(self, border: Border, layers: range, forms: Sequence[Any]) -> None:
        self.border, self.layers, self.forms = border, layers, forms
        self.end = max((place.layer for place in border.gives.values()), default=-1)
        self.received: Mapping[str, Tensor] | None = None
        self.found: dict[str, Tensor] = {}

    def enter(self, number: int, given: inspect.BoundArguments) -> None:
        """An own layer is called: give it what was received."""
        for path, tensor in self._taken(number):
            given.arguments = replace_at(given.arguments, path, tensor)

    def leave(self, number: int, output: Any) -> None:
        """An own layer has returned."""
        if number == len(self.forms) - 1 and self.end == len(self.forms):
            self._note(len(self.forms), output)

    def skip(self, number: int, given: inspect.BoundArguments) -> Any:
        """A layer of another stage is called. Returns something of the form of what it would return."""
        if number >= self.layers.stop:
            self._note(number, given.arguments)
        output = form_filled(self.forms[number], given.arguments)
        if number == len(self.forms) - 1:
            for path, tensor in self._taken(len(self.forms)):
                output = replace_at(output, path, tensor)
        return output

    def _taken(self, number: int) -> list[tuple[Path, Tensor]]:
        if self.received is None:
            raise RuntimeError(
                f"layer {number} was called outside its stage's forward: let activations be computed again by "
                "gradient_checkpointing_enable."
            )
        items = self.border.takes.items()
        return [(p.path, self.received[name]) for name, places in items for p in places if p.layer == number]

    def _note(self, number: int, values: Any) -> None:
        for name, place in self.border.gives.items():
            if place.layer == number:
                self.found[name] = find_at(values, place.path)
        if number == self.end:
            raise Reached


class CrossingLayer(nn.Module):
    """An own layer at which something crosses. Around the call, and so outside of checkpoints within it."""

    _crossing: tuple[Crossing, int, inspect.Signature]

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        crossing, number, signature = self._crossing
        given = signature.bind(*arguments, **options)
        crossing.enter(number, given)
        output = super().__call__(*given.args, **given.kwargs)
        crossing.leave(number, output)
        return output


_classes: dict[type, type] = {}


def let_cross(layers: nn.ModuleList, crossing: Crossing) -> None:
    """Replace layers of other stages in the list, and let own ones take what they receive."""
    at = {place.layer for places in crossing.border.takes.values() for place in places} | {crossing.end - 1}
    for number, layer in enumerate(layers):
        if number not in crossing.layers:
            layers[number] = AbsentLayer(layer, number, crossing.skip)
        elif crossing.is_everywhere or number in at:
            own = type(layer)
            if own not in _classes:
                members = {"__module__": own.__module__, "__call__": CrossingLayer.__call__}
                _classes[own] = type(own.__name__, (CrossingLayer, own), members)
            layer.__dict__["_crossing"] = crossing, number, inspect.signature(layer.forward)
            layer.__class__ = _classes[own]


def tensors_in(values: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """All tensors in mappings, lists and tuples, each with its path."""
    if torch.is_tensor(values):
        yield path, values
    elif isinstance(values, Mapping):
        for key in values:
            yield from tensors_in(values[key], (*path, key))
    elif isinstance(values, (list, tuple)):
        for index, one in enumerate(values):
            yield from tensors_in(one, (*path, index))


def find_at(values: Any, path: Path) -> Any:
    """Raises LookupError or TypeError where there is nothing."""
    for key in path:
        values = values[key]
    return values


def replace_at(values: Any, path: Path, value: Any) -> Any:
    """The same values with another one at a path. Mappings, which layers may share, are written to, as are lists."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(values, MutableMapping):
        values[key] = replace_at(values.get(key), rest, value)
        return values
    items = list(values or ())
    items += [None] * (key + 1 - len(items))
    items[key] = replace_at(items[key], rest, value)
    if isinstance(values, list):
        values[:] = items
        return values
    return type(values)(*items) if hasattr(values, "_fields") else tuple(items)


def form_of(output: Any, first: Any) -> Any:
    """What a layer returns, with FIRST for tensors like its first argument, and nothing for others."""

    def mark(leaf: Any) -> Any:
        if not torch.is_tensor(leaf):
            return leaf
        return FIRST if torch.is_tensor(first) and leaf.shape == first.shape else leaf.new_zeros(())

    return pytree.tree_map(mark, output)


def form_filled(form: Any, arguments: Mapping[str, Any]) -> Any:
    first = first_tensor(arguments)
    return pytree.tree_map(lambda leaf: first if isinstance(leaf, str) and leaf == FIRST else leaf, form)


def first_tensor(arguments: Mapping[str, Any]) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(list(arguments.values())) if torch.is_tensor(leaf)), None)
