"""Which tensor of the whole model is which of a stage's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ..chunks import fully_qualified_name, unwrap

Place = tuple[int, str]
"""A stage, and the name of a tensor on it."""


def parameters_of(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A chunk's parameters by the names in the model inside of its wrappers, each name of a tied one too."""
    for name, parameter in unwrap(chunk).named_parameters(remove_duplicate=False):
        yield fully_qualified_name(name), parameter


def buffers_of(chunk: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those of a state_dict: others are constants, or stand for what lies on another stage."""
    for path, module in unwrap(chunk).named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield fully_qualified_name(f"{path}.{name}" if path else name), buffer


def tensors_of(chunk: nn.Module) -> dict[str, Tensor]:
    return {**dict(parameters_of(chunk)), **dict(buffers_of(chunk))}


def gradient_of(parameter: Any) -> Tensor | None:
    """Megatron's replicas keep it in `main_grad`."""
    grad: Tensor | None = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
    return grad


def full(tensor: Any) -> Tensor:
    """A copy of all of its values, also of a DTensor."""
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().cpu().clone()


def copy_into(destination: Any, value: Tensor) -> None:
    """Raises ValueError for another shape."""
    if destination.shape != value.shape:
        raise ValueError(f"its shape is {tuple(destination.shape)}, and {tuple(value.shape)} in the whole model")
    if hasattr(destination, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(destination.device), destination.device_mesh, destination.placements)
    destination.data.copy_(value)
