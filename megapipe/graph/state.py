"""The modules of a stage that runs as graphs, and their parameters and buffers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Mode", "State", "autocast_dtype"]


class Mode(NamedTuple):
    """A graph is right for one of these, besides the arguments."""

    training: tuple[bool, ...]
    weights: tuple[tuple[Any, torch.Size, torch.dtype, torch.device, bool], ...]
    autocast: torch.dtype | None


class State:
    """Parameters first, then buffers, each once, tied ones too."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        weights = {parameter: name for name, parameter in module.named_parameters()}
        self.num_weights = len(weights)
        self.names = [*weights.values(), *(name for name, buffer in module.named_buffers() if buffer not in weights)]
        self._owners = [_owner(module, name) for name in self.names]
        self._structure = self._look()
        self._seen = self._all()

    def tensors(self) -> list[Tensor]:
        """Looked up anew: they may have been replaced."""
        return [tensors[name] for tensors, name in self._owners]

    def mode(self) -> Mode:
        """The one that the stage is in."""
        tensors = self.tensors()
        return Mode(
            tuple([module.training for module in self.modules]),
            tuple([(getattr(t, "placements", type(t)), t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            autocast_dtype(tensors),
        )

    def name(self, number: int) -> str:
        """The name of one of the tensors, or of the inputs that come after them."""
        return self.names[number] if number < len(self.names) else f"its input {number - len(self.names)}"

    def is_same(self) -> bool:
        """Whether the modules inside, and which of their tensors are the same, are as they were."""
        found = self._all()
        if len(found) == len(self._seen) and all(map(operator.is_, found, self._seen)):
            return True
        if self._look() != self._structure:
            return False
        self._seen = found
        return True

    def _all(self) -> list[Any]:
        return [
            value
            for module in self.modules
            for values in (module._modules, module._parameters, module._buffers)
            for value in values.values()
        ]

    def _look(self) -> list[Any]:
        numbers = {id(module): number for number, module in enumerate(self.modules)}
        found: dict[int, int] = {}
        look: list[Any] = []
        for module in self.modules:
            look += [numbers.get(id(child)) for child in module._modules.values()]
            for tensors in (module._parameters, module._buffers):
                look += [(name, found.setdefault(id(tensor), len(found))) for name, tensor in tensors.items()]
        return look


def autocast_dtype(tensors: Sequence[Tensor]) -> torch.dtype | None:
    device_type = tensors[0].device.type if tensors else "cpu"
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a parameter or buffer, and its key there."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters if last in owner._parameters else owner._buffers, last
