"""Calls of modules that keep nothing for the backward: they are run once more before it, and then keep all.

Autograd's graph is made in the forward, with empty places where it would have saved tensors. The replay saves tensors
in the same order, which go into the places; what else it computes is dropped. So backward, its hooks and split weight
gradients know nothing of it, and may begin with what a replay has made long before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor

from .regions import Region
from .saver import Saver, as_it_is

__all__ = ["Replay", "random_generators", "recomputing"]


class _Place:
    """One saved tensor. Only autograd holds it, until its backward is done."""

    __slots__ = ("__weakref__", "shape", "tensor")

    def __init__(self, shape: torch.Size) -> None:
        self.shape = shape
        self.tensor: Tensor | None = None


class _Complete(BaseException):
    """A replay has saved all that the forward did: the rest need not be computed."""


class Replay:
    """One call of a module, to be run again.

    Args:
        call: what runs the module.
    """

    def __init__(
        self,
        region: Region,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        device: torch.device,
    ) -> None:
        self._region = region
        self._name = type(region.module).__name__
        self._call: Callable[..., Any] | None = call
        self._args, self._kwargs = args, kwargs
        self._device = device
        self._places: list[weakref[_Place]] = []

    def first(self) -> Any:
        """The forward. It saves nothing."""
        self._random = random_states(self._device)
        self._autocasts = [_autocast_of(device_type) for device_type in {"cpu", self._device.type}]
        tensors = [tensor for tensor in (*self._args, *self._kwargs.values()) if isinstance(tensor, Tensor)]
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
        before = [[buffer._version for buffer in buffers] for buffers in self._region.buffers]
        assert self._call is not None
        with Saver(self._leave_out, self._fetch):
            result = self._call(*self._args, **self._kwargs)
        self._changed = [
            buffer
            for buffers, versions in zip(self._region.buffers, before)
            if versions != [buffer._version for buffer in buffers]
            for buffer in buffers
        ]
        return result

    def run(self) -> None:
        """Save what the forward would have saved. Only the first time."""
        if self._call is None:
            return
        call, self._call = self._call, None
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{self._name} cannot be computed again: its input of shape "
                    f"{list(tensor.shape)} was changed in place since its forward. Give it a clone()."
                )
        with ExitStack() as around:
            around.callback(_set_random_states, random_states(self._device), self._device)
            _set_random_states(self._random, self._device)
            for buffer in self._changed:
                around.callback(_restore, buffer, buffer.clone())
            for autocast in self._autocasts:
                around.enter_context(autocast())
            around.enter_context(torch.enable_grad())
            self._make_all(call)
        self._args, self._kwargs, self._versions, self._places, self._changed = (), {}, [], [], []

    def _make_all(self, call: Callable[..., Any]) -> None:
        self._num_made = 0
        if not self._places:
            return
        try:
            with Saver(self._make, as_it_is):
                call(*self._args, **self._kwargs)
        except _Complete:
            return
        raise RuntimeError(
            f"{self._name}, computed again, saves {self._num_made} tensors for its backward, and in "
            f"its forward saved {len(self._places)}: it goes by more than its input and torch's random numbers. Leave "
            "it out of config.recompute."
        )

    def _leave_out(self, tensor: Tensor) -> _Place:
        place = _Place(tensor.shape)
        self._places.append(weakref(place))
        return place

    def _make(self, tensor: Tensor) -> Tensor:
        place = self._places[self._num_made]()
        self._num_made += 1
        kept = tensor.detach()
        if place is not None:
            if place.shape != tensor.shape:
                raise RuntimeError(
                    f"{self._name}, computed again, has a tensor of shape {list(tensor.shape)} where "
                    f"its forward had {list(place.shape)}: it goes by more than its input and torch's random numbers. "
                    "Leave it out of config.recompute."
                )
            place.tensor = kept
        if self._num_made == len(self._places):
            raise _Complete
        return kept

    def _fetch(self, place: _Place) -> Tensor:
        if place.tensor is None:
            self.run()
            assert place.tensor is not None, "a saved tensor was not computed again"
        return place.tensor


@contextmanager
def recomputing(regions: Sequence[Region], device: torch.device) -> Iterator[list[Replay]]:
    """The context of a forward whose calls of these modules keep nothing for the backward, where there will be one.
    Their replays are in the list, in the order of the calls.

    Raises:
        ValueError: none of the modules has been called.
    """
    replays: list[Replay] = []
    intercepted = [_Intercepted(region, replays, device) for region in regions]
    with ExitStack() as around:
        for one in intercepted:
            around.enter_context(one)
        yield replays
    if intercepted and not any(one.was_called for one in intercepted):
        names = ", ".join(dict.fromkeys(type(region.module).__name__ for region in regions))
        raise ValueError(
            f"config.recompute is set, but forward_step_func has not called {names}, whose activations it means: call "
            "the chunk, not parts of it, and not in segments (megapipe.overlap), or leave config.recompute None."
        )


class _Intercepted(AbstractContextManager[None]):
    """A module whose calls become replays."""

    def __init__(self, region: Region, replays: list[Replay], device: torch.device) -> None:
        self._region, self._replays, self._device = region, replays, device
        self._module = module = region.module
        self._is_running = False
        self.was_called = False
        # module.compile() compiles the call and not the forward, which must stay as it was compiled.
        is_compiled = getattr(module, "_compiled_call_impl", None) is not None
        self._name = "_compiled_call_impl" if is_compiled else "forward"

    def __enter__(self) -> None:
        self._own = self._module.__dict__.get(self._name)
        self._call = getattr(self._module, self._name)
        self._module.__dict__[self._name] = self._run

    def __exit__(self, *error: object) -> None:
        if self._own is None:
            del self._module.__dict__[self._name]
        else:
            self._module.__dict__[self._name] = self._own

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.was_called = True
        if self._is_running or not torch.is_grad_enabled():  # a call within the call is part of it
            return self._call(*args, **kwargs)
        self._replays.append(replay := Replay(self._region, self._call, args, kwargs, self._device))
        self._is_running = True
        try:
            return replay.first()
        finally:
            self._is_running = False


random_generators: list[tuple[Callable[[], Any], Callable[[Any], None]]] = []
"""Functions that return and set the states of random numbers besides torch's own: a framework's."""


def random_states(device: torch.device) -> list[Any]:
    states: list[Any] = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states + [get() for get, _ in random_generators]


def _set_random_states(states: list[Any], device: torch.device) -> None:
    cpu, *others = states
    torch.set_rng_state(cpu)
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(others.pop(0), device)
    for (_, set_state), state in zip(random_generators, others):
        set_state(state)


def _autocast_of(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes the autocast that is in force now."""
    if not torch.amp.is_autocast_available(device_type):
        return ExitStack
    settings: dict[str, Any] = {
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
    return lambda: torch.autocast(device_type, **settings)


def _restore(buffer: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        buffer.copy_(value)
