"""What a forward changes besides its output, brought back to what it was before."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

__all__ = ["restores_of_buffers", "restores_of_random_states"]


def restores_of_random_states(device: torch.device) -> Iterator[Callable[[], None]]:
    """Functions that bring the random numbers of torch, Python and NumPy to where they are now."""
    yield functools.partial(torch.set_rng_state, torch.get_rng_state())
    if device.type != "cpu":
        module = torch.get_device_module(device)
        yield functools.partial(module.set_rng_state, module.get_rng_state(device), device)
    yield functools.partial(random.setstate, random.getstate())
    if (numpy := sys.modules.get("numpy")) is not None:
        yield functools.partial(numpy.random.set_state, numpy.random.get_state())


def restores_of_buffers(models: list[nn.Module]) -> Iterator[Callable[[], None]]:
    """The same for statistics and counters that a forward moves on, and for buffers that it makes or replaces."""
    for module in (module for model in models for module in model.modules()):
        values = [(buffer, buffer.clone()) for buffer in module._buffers.values() if buffer is not None]
        yield functools.partial(_restore_buffers, module, dict(module._buffers), values)


def _restore_buffers(module: nn.Module, buffers: dict[str, Tensor | None], values: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in values:
            buffer.copy_(value)
    module._buffers.clear()
    module._buffers.update(buffers)
