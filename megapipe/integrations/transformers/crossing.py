"""What crosses the boundaries of a stage, while it runs the whole model's own forward.

Layers are called by the model's own code, in its own loop. Where the first layer of a stage is called, it is given what
the stage has received instead of what the code before it has made of nothing. Where the first layer behind the stage
would be called, its arguments are what the stage hands on, and the forward ends.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .cut import AbsentLayer

__all__ = ["FIRST", "Border", "Crossing", "Place", "Reached", "find_at", "let_cross", "replace_at", "tensors_in"]

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
    return pytree.tree_map(lambda leaf: first if isinstance(leaf, str) and leaf is FIRST else leaf, form)


def first_tensor(arguments: Mapping[str, Any]) -> Tensor | None:
    return next((leaf for leaf in pytree.tree_leaves(list(arguments.values())) if torch.is_tensor(leaf)), None)
