"""A module of which only the units of one stage are left. Its forward is that of the whole module."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .running import Call

__all__ = ["Share", "part_of"]


class Share(NamedTuple):
    """What a stage does, of all calls of units in their order."""

    stage: int
    calls: Sequence[Call]
    own: frozenset[int]
    """The numbers of the calls that this stage runs."""
    takes: list[str]
    """The tensors that it receives."""
    gives: list[str]
    """The tensors that it hands on."""
    inputs: Mapping[str, Tensor]
    """The example's, of which later stages know the shapes only."""
    example: Any
    """What the module was called with, without its tensors."""
    is_last: bool


class Reached(BaseException):
    """Ends a forward in which nothing is left to do. No code that looks for errors should catch it."""


class Absent(nn.Module):
    """Stands where a unit of another stage was, and has its numbers, such as a convolution's stride."""

    def __init__(self, part: _Parts, name: str, unit: nn.Module) -> None:
        super().__init__()
        self.__dict__.update((key, value) for key, value in vars(unit).items() if key not in self.__dict__)
        self.run, self.name = part, name

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.run.called(self.name)


class Repeated(nn.Module):
    """Stands where a unit without weights was, of which some calls belong to other stages."""

    def __init__(self, part: _Parts, name: str, unit: nn.Module) -> None:
        super().__init__()
        self.run, self.name, self.unit = part, name, unit

    def forward(self, *arguments: Any, **options: Any) -> Any:
        if self.run.number not in self.run.share.own:
            return self.run.called(self.name)
        output = self.unit(*arguments, **options)
        self.run.returned(self.name, output)
        return output


class _Parts:
    """One forward of a part: which call is next, and the tensors known so far. Empty in between."""

    def __init__(self, share: Share) -> None:
        self.share = share
        self.number = 0
        self.known: dict[str, Tensor] = {}
        self.end = max(share.own, default=-1)
        self.is_running = False

    def called(self, name: str) -> Any:
        """A unit of another stage is called: return what was received of it, or nothing of the same shape."""
        call = self._next(name)
        leaves, structure = pytree.tree_flatten(call.form)
        for key, place in call.outputs.items():
            leaves[place] = self.known[key] if key in self.known else nothing_like(leaves[place], self.device)
        self._end()
        return pytree.tree_unflatten(leaves, structure)

    def returned(self, name: str, output: Any) -> None:
        """An own unit has returned."""
        call = self._next(name)
        leaves = pytree.tree_leaves(output)
        self.known.update((key, leaves[place]) for key, place in call.outputs.items() if key in self.share.gives)
        self._end()

    def _next(self, name: str) -> Call:
        calls = self.share.calls
        wanted = calls[self.number].unit if self.number < len(calls) else "the end"
        if wanted != name:
            raise RuntimeError(
                f"stage {self.share.stage} calls {name} where the example's forward had {wanted}: a module that was "
                "split must call its units in the same order for every batch."
            )
        self.number += 1
        return calls[self.number - 1]

    def _end(self) -> None:
        if not self.share.is_last and self.number > self.end:
            raise Reached

    @property
    def device(self) -> torch.device | None:
        return next((tensor.device for tensor in self.known.values()), None)


def nothing_like(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


class Part:
    """The forward of a part. Its class is derived from this one and the module's own."""

    _parts: _Parts

    def forward(self, *arguments: Any) -> Any:
        """Takes the module's arguments on the first stage, and what was received on others."""
        parts, share = self._parts, self._parts.share
        if share.stage == 0:
            parts.known = _named(arguments, share)
            given = arguments
        else:
            (received,) = arguments
            parts.known = dict(received) if isinstance(received, dict) else {share.takes[0]: received}
            leaves, structure = pytree.tree_flatten(share.example)
            for name, like in share.inputs.items():
                place = int(name.split()[1])
                leaves[place] = parts.known[name] if name in parts.known else nothing_like(like, parts.device)
            given = pytree.tree_unflatten(leaves, structure)
        parts.number = 0
        try:
            if parts.end >= 0 or share.is_last:
                return super().forward(*given)  # type: ignore[misc]
        except Reached:
            pass
        finally:
            known, parts.known = parts.known, {}
        message = {name: known[name] for name in share.gives}
        return message if len(message) > 1 else next(iter(message.values()))


def _named(arguments: tuple[Any, ...], share: Share) -> dict[str, Tensor]:
    """The tensors of the module's arguments by their names, of the example's shapes."""
    leaves = pytree.tree_leaves(arguments)
    found: dict[str, Tensor] = {}
    for name, like in share.inputs.items():
        place = int(name.split()[1])
        tensor = leaves[place] if place < len(leaves) else None
        if not torch.is_tensor(tensor) or tensor.shape != like.shape:
            got = list(tensor.shape) if torch.is_tensor(tensor) else tensor
            raise ValueError(
                f"{name} of a module that was split must have the example's shape {list(like.shape)}, got {got}: split "
                "it again with such an example, or pad the batch."
            )
        found[name] = tensor
    return found


_classes: dict[type, type] = {}


def part_of(model: nn.Module, units: Sequence[str], share: Share, drop: Sequence[str]) -> nn.Module:
    """The module with its own units, with others' places taken, and without the parameters in `drop`. The given module
    stays whole, and shares what is left."""
    parts = _Parts(share)
    own = {share.calls[number].unit for number in share.own}
    part = _copy(model, "", set(units), own, parts)
    for name in drop:
        owner, _, attribute = name.rpartition(".")
        module = part.get_submodule(owner)
        like = getattr(module, attribute)
        delattr(module, attribute)
        module.register_buffer(attribute, torch.zeros_like(like), persistent=False)
    kind = type(part)
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (Part, kind), {"__module__": kind.__module__})
    part.__class__ = _classes[kind]
    part.__dict__["_parts"] = parts
    return part


def _copy(module: nn.Module, name: str, units: set[str], own: set[str], parts: _Parts) -> nn.Module:
    if name in units and name not in own:
        return Absent(parts, name, module)
    copied = copy.copy(module)
    copied._modules, copied._buffers = dict(module._modules), dict(module._buffers)
    copied._parameters = dict(module._parameters)
    if name in units:
        if {number for number, call in enumerate(parts.share.calls) if call.unit == name} - parts.share.own:
            return Repeated(parts, name, copied)
        copied._forward_hooks = module._forward_hooks.copy()
        copied.register_forward_hook(lambda m, arguments, output: parts.returned(name, output))
        return copied
    for key, child in module.named_children():
        copied._modules[key] = _copy(child, f"{name}.{key}" if name else key, units, own, parts)
    return copied
