"""What a call of a module reads and changes besides its arguments: random numbers, buffers, other attributes and
autocast."""

from __future__ import annotations

import copy
import random
import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..frameworks import frameworks
from .offload import storages_of

Stream = tuple[Callable[[], Any], Callable[[Any], Any]]
"""Functions that return and set the state of a stream of random numbers."""

_SMALL = 2**20
"""Bytes below which a buffer is copied before each call, whatever its version says: batch norm changes some without."""
_OF_ALL_MODULES = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"}) - {"training"}
"""Attributes that say nothing of one module, or through which it is called."""


class StateBefore:
    """What a call of a module reads, as it is before the call.

    Args:
        device: whose random numbers it draws, besides the CPU's.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._autocasts = autocasts({"cpu", device.type})
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._large: list[tuple[Tensor, int]] = []
        keep = partial(self._kept, {})
        for inner in module.modules():
            own = {name: value for name, value in vars(inner).items() if _is_state(name, value)}
            self._attributes.append((vars(inner), pytree.tree_map(keep, own)))
            if inner._buffers:
                self._attributes.append((inner._buffers, pytree.tree_map(keep, dict(inner._buffers))))
        values = [value for _, attributes in self._attributes for value in attributes.values()]
        self._streams = [*_random_streams(device), *(stream for value in values for stream in _streams_of(value))]
        self._random = [get() for get, _ in self._streams]

    def _kept(self, copies: dict[int, Tensor], value: Any) -> Any:
        """The same, or the copy of a tensor that is no parameter, as buffers and counters are."""
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.grad_fn is not None:
            return value
        if value.is_inference():
            return value
        if value.numel() * value.itemsize >= _SMALL:
            self._large.append((value, value._version))
            return value
        if id(value) not in copies:
            copies[id(value)] = value.detach().clone().requires_grad_(value.requires_grad)
        return copies[id(value)]

    def has_lost(self) -> bool:
        """Whether a tensor too large to be copied was changed in place since."""
        return any(tensor._version != version for tensor, version in self._large)

    @contextmanager
    def again(self) -> Iterator[None]:
        """All as it was before the call. Afterwards it is as it is now."""
        with ExitStack() as around:
            for get, put in self._streams:
                around.callback(put, get())
            for attributes, before in self._attributes:
                around.callback(_set_all, attributes, dict(attributes))
                attributes.update(before)
            for (_, put), state in zip(self._streams, self._random):
                put(state)
            for autocast in self._autocasts:
                around.enter_context(autocast())
            around.enter_context(torch.enable_grad())
            yield


def _set_all(attributes: dict[str, Any], values: dict[str, Any]) -> None:
    attributes.clear()
    attributes.update(values)


def _is_state(name: str, value: Any) -> bool:
    """Whether it is put back. Results of an earlier call are not, which would be kept alive."""
    return name not in _OF_ALL_MODULES and not (isinstance(value, Tensor) and value.grad_fn is not None)


def _random_streams(device: torch.device) -> Iterator[Stream]:
    yield torch.get_rng_state, torch.set_rng_state
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield partial(module.get_rng_state, device), lambda state: module.set_rng_state(state, device)
    yield from _streams_outside_torch().values()
    for framework in frameworks():
        yield from framework.random_streams()


def _streams_outside_torch() -> dict[str, Stream]:
    streams: dict[str, Stream] = {"Python": (random.getstate, random.setstate)}
    numpy = sys.modules.get("numpy.random")
    return streams if numpy is None else {**streams, "NumPy": (numpy.get_state, numpy.set_state)}


@contextmanager
def noting_draws() -> Iterator[list[str]]:
    """Around a call that becomes a graph: the list then says of whom it has drawn random numbers, besides torch. Their
    states are put back."""
    drawn: list[str] = []
    before = {name: (get(), get, put) for name, (get, put) in _streams_outside_torch().items()}
    try:
        yield drawn
    finally:
        for name, (state, get, put) in before.items():
            if list(map(_as_bytes, get())) != list(map(_as_bytes, state)):
                drawn.append(name)
                put(state)


def _as_bytes(part: Any) -> Any:
    return part.tobytes() if hasattr(part, "tobytes") else part


def restores_of(device: torch.device, models: Sequence[nn.Module] = ()) -> list[Callable[[], None]]:
    """Functions that bring random numbers to where they are now, and with them the statistics, counters and other
    tensors beside parameters that a forward of these models writes to, and buffers that it makes or replaces."""
    modules = [module for model in models for module in model.modules()]
    attributes = [value for module in modules for name, value in vars(module).items() if _is_state(name, value)]
    leaves = pytree.tree_leaves([attributes, [module._buffers for module in modules]])
    held = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    weights = storages_of(parameter for model in models for parameter in model.parameters()) if held else set()
    return [
        *(partial(put, get()) for get, put in _random_streams(device)),
        *(partial(_write_back, one, one.detach().clone()) for one in held if not storages_of([one]) <= weights),
        *(partial(_set_all, module._buffers, dict(module._buffers)) for module in modules),
    ]


def _write_back(tensor: Tensor, value: Tensor) -> None:
    """Batch norm and tracers write without a new version. What was expanded cannot be written to."""
    if not tensor.is_meta and not torch.equal(tensor, value):
        tensor.detach().copy_(value)


@contextmanager
def undoing_changes(modules: Iterable[nn.Module]) -> Iterator[Callable[[], list[str]]]:
    """Around a call that becomes a graph: attributes of the modules, what is registered with them, and the content of
    their lists, dicts and sets are put back. The function says which numbers, and which lists by their lengths, are not
    what they were."""
    before = [(name, one, copy.copy(one)) for m in modules for name, one in _containers_in(type(m).__name__, vars(m))]

    def changed() -> list[str]:
        lists = [name for name, now, then in before if isinstance(now, (list, deque)) and len(now) != len(then)]
        dicts = [(now, then) for _, now, then in before if isinstance(now, dict)]
        return lists + [str(key) for now, then in dicts for key in then if _is_other(then[key], now.get(key))]

    try:
        yield changed
    finally:
        for _, container, content in before:
            container.clear()
            (container.update if isinstance(container, (dict, set)) else container.extend)(content)


def tensors_kept(module: nn.Module) -> dict[str, list[Tensor]]:
    """The tensors among the attributes of a module, in lists and dicts too."""
    attributes = {name: value for name, value in vars(module).items() if name not in _OF_ALL_MODULES}
    return {
        name: [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        for name, value in attributes.items()
    }


def _is_other(number: Any, now: Any) -> bool:
    return isinstance(number, (int, float)) and isinstance(now, (int, float)) and number != now


def _containers_in(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if type(value) in (list, deque, set, dict, defaultdict, OrderedDict):
        yield name, value
        for key, inner in value.items() if isinstance(value, dict) else ((name, inner) for inner in value):
            yield from _containers_in(str(key), inner)


def _streams_of(value: Any) -> Iterator[Stream]:
    """Those of an attribute that is a generator of random numbers."""
    numpy: Any = sys.modules.get("numpy.random")
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.RandomState)):
        yield value.get_state, value.set_state
    elif isinstance(value, random.Random):
        yield value.getstate, value.setstate
    elif numpy is not None and isinstance(value, numpy.Generator):
        yield lambda: value.bit_generator.state, partial(setattr, value.bit_generator, "state")


def autocasts(device_types: Iterable[str]) -> Sequence[Callable[[], AbstractContextManager[Any]]]:
    """What makes the autocasts that are in force now."""
    return [
        partial(
            torch.autocast,
            device_type,
            dtype=torch.get_autocast_dtype(device_type),
            enabled=torch.is_autocast_enabled(device_type),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for device_type in device_types
        if torch.amp.is_autocast_available(device_type)
    ]
