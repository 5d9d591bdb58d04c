"""What a chunk is made of in a step: the only key of what is kept for it from step to step.

What has been found out about a chunk in one step (which parameters get gradients, that a replay is exact) holds for as
long as the chunk is made of the same parts in the same state. So it is kept in the chunk's `Structure`. Where anything
has changed, the chunk has another structure, of which nothing is known yet.
"""

from __future__ import annotations

import sys
from functools import partial
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

MOST_STRUCTURES = 64
"""How many a process keeps: those used last."""


class Structure:
    """A chunk in one state.

    That is: its modules, which they are, of which types, in training or not, with how many hooks, and whether their
    `forward` is replaced; its parameters, which they are, whether they are trained, their dtypes, devices and
    placements; and the dtypes and devices of its buffers. Which tensor a buffer is does not count, since forwards may
    put another one in its place.

    Attributes:
        kept: what has been found out about the chunk. Write to it only after the step, or the check, by which it was
            found has succeeded.
        changes: for each part that runs as a graph, what has changed in it that the graph cannot know.
    """

    __slots__ = ("_parts", "changes", "kept")

    def __init__(self, changes: list[str]) -> None:
        self.kept: dict[Any, Any] = {}
        self.changes = changes
        self._parts: list[ref[Any]] = []


def structure_of(chunk: nn.Module) -> Structure:
    """The structure of a chunk. It is the same object as long as the chunk is as it was.

    All modules of the chunk are looked at, which takes 0.1 ms for about a hundred of them. So a step calls this once:
    `Call.structures` has the results.
    """
    key: list[Any] = []
    parts: list[Any] = []
    changes: list[str] = []
    seen: set[nn.Module] = set()
    to_see = [chunk]
    while to_see:
        module = to_see.pop()
        if module in seen:
            continue
        seen.add(module)
        parts.append(module)
        kind = type(module)
        key += (id(module), kind, module.training, "forward" in module.__dict__)
        key += (len(module._forward_pre_hooks), len(module._forward_hooks))
        key += (len(module._backward_pre_hooks), len(module._backward_hooks))
        for name, parameter in module._parameters.items():
            key.append(name)
            if parameter is not None:
                parts.append(parameter)
                key += (id(parameter), parameter.requires_grad, parameter.dtype, parameter.device)
                if type(parameter) is not nn.Parameter:
                    key.append(getattr(parameter, "placements", None))
        for buffer in module._buffers.values():
            if buffer is not None:
                key += (buffer.dtype, buffer.device)
        if hasattr(kind, "find_change"):
            key.append(change := module.find_change())  # type: ignore[operator]
            changes += [] if change is None else [change]
        for child in module._modules.values():
            if child is not None:
                to_see.append(child)
    whole = tuple(key)
    structure = _structures.pop(whole, None)
    if structure is None:
        structure = _new(whole, parts, changes)
    _structures[whole] = structure
    return structure


def num_hooks(module: nn.Module) -> tuple[int, int, int, int]:
    """How many hooks a module has of each kind."""
    return (
        len(module._forward_pre_hooks),
        len(module._forward_hooks),
        len(module._backward_pre_hooks),
        len(module._backward_hooks),
    )


_structures: dict[tuple[Any, ...], Structure] = {}
"""The structures of all chunks, in the order of their last use."""


def _new(key: tuple[Any, ...], parts: list[Any], changes: list[str]) -> Structure:
    structure = Structure(changes)
    # A key holds numbers of objects. When one of these is gone, another object may get its number.
    forget = partial(_forget, key)
    structure._parts = [ref(part, forget) for part in parts]
    for oldest in list(_structures)[: 1 - MOST_STRUCTURES]:
        _structures.pop(oldest, None)
    return structure


def _forget(key: tuple[Any, ...], part: ref[Any]) -> None:
    _structures.pop(key, None)


_of_chunks: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()


def kept_for(chunk: nn.Module) -> dict[Any, Any]:
    """What is kept for a chunk whatever becomes of its parts, since it does not depend on them alone: the messages that
    other ranks know too, and tokens whose gradients are added up over calls."""
    return _of_chunks.setdefault(chunk, {})


class GraphFacts:
    """What the graph of a module has in it once and for all: its parts and their types, that these have no hooks of
    their own, and the plain values (a dropout's `p`, an adapter's scaling) that their attributes hold.

    Args:
        module: as it is traced.
        reads_values: its graph was made with the values of attributes.
    """

    def __init__(self, module: nn.Module, reads_values: bool = True) -> None:
        named = dict(module.named_modules())
        self._names, self._modules = [*named], [*named.values()]
        self._types = [*map(type, self._modules)]
        self._hooks = [*map(num_hooks, self._modules)]
        self._forwards = [vars(part).get("forward") for part in self._modules]
        self._values = [plain_values(part) for part in self._modules] if reads_values else []

    def find_change(self, module: nn.Module) -> str | None:
        """The first thing that is not as it was, in words that go on a sentence about the module; None where all is."""
        parts = list(module.modules())
        for name, before, now in zip_longest(self._names, self._modules, parts):
            if before is not now:
                return f"its part {name or type(now).__name__} has been exchanged, added or removed"
        for number, now in enumerate(parts):
            if number == 0 or _is_sharded(now):  # which are called, or looked after
                continue
            if type(now) is not self._types[number]:
                return f"its part {self._names[number]} has another type than then"
            if vars(now).get("forward") is not self._forwards[number]:
                return f"its part {self._names[number]} has another forward than then"
            if num_hooks(now) != self._hooks[number]:
                return f"its part {self._names[number]} has other hooks than then"
        for path, part, values in zip(self._names, self._modules, self._values):
            for name, before in values.items():
                now = _plain(vars(part).get(name, _NO_VALUE))
                if now is not before and now != before:
                    is_now = "no plain value" if now is _NO_VALUE else repr(now)
                    return f"{path}{'.' if path else ''}{name}, which was {before!r} then, is {is_now} now"
        return None


def _is_sharded(module: nn.Module) -> bool:
    """Whether torch's `fully_shard` has given it a class and hooks of its own."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def plain_values(module: nn.Module) -> dict[str, Any]:
    """The attributes of one module, without its parts, that are numbers, texts or containers of these."""
    values = {name: _plain(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
    return {name: value for name, value in values.items() if value is not _NO_VALUE}


_OF_EVERY_MODULE = vars(nn.Module()).keys()
_NO_VALUE = object()
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def _plain(value: Any) -> Any:
    """A number, a text, or a container of these, as a value that can be compared later. `_NO_VALUE` for all others."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        value = [*value.items()]
    if not isinstance(value, (list, tuple)):
        return _NO_VALUE
    parts = tuple(map(_plain, value))
    return _NO_VALUE if _NO_VALUE in parts else parts
