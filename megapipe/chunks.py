"""The chunks of a rank, inside of their wrappers: their attributes, parameters, gradients and shards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Models = nn.Module | Sequence[nn.Module]
"""A rank's chunks, or its only one."""


WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")
"""Torch's prefixes for what it wraps inside of a chunk."""


def wrapped_in(chunk: Any) -> list[Any]:
    """A chunk, and the modules that it wraps as `module`, or torch.compile's as `_orig_mod`, from the outside in. A
    wrapper has no parameters and buffers besides those of the module in it: so a model with one part called `module` is
    none."""
    found: list[Any] = []
    inner = chunk
    while isinstance(inner, nn.Module):
        if found and not _is_all_of(found[-1], inner):
            break
        found.append(inner)
        if getattr(type(inner), "calls_no_modules", False):
            break
        modules = inner._modules  # no dict where torch.jit.script made it
        inner = modules["_orig_mod"] if "_orig_mod" in modules else getattr(inner, "module", None)
    return found


def _is_all_of(outer: nn.Module, inner: nn.Module) -> bool:
    if not (outer._parameters or outer._buffers) and [*outer.children()] == [inner]:
        return True  # without a look at each
    return {*map(id, tensors_of(inner))} == {*map(id, tensors_of(outer))}


def unwrap(chunk: nn.Module) -> nn.Module:
    """The model inside of all wrappers."""
    return wrapped_in(chunk)[-1]  # type: ignore[no-any-return]


def tensors_of(chunk: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers."""
    yield from chunk.parameters()
    yield from nn.Module.buffers(chunk)  # wrappers for data parallelism keep gradient buffers as `buffers`


def find_attribute(chunk: Any, name: str) -> Any:
    """The attribute of `chunk`, or of the first module inside its wrappers that has it, or None."""
    if hasattr(chunk, name):
        return getattr(chunk, name)
    for inner in wrapped_in(chunk):
        if hasattr(inner, name):
            return getattr(inner, name)
    return None


def named_parameters(chunk: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of a chunk under the names that the model inside of its wrappers gives them."""
    for name, parameter in unwrap(chunk).named_parameters(remove_duplicate=remove_duplicate):
        yield fully_qualified_name(name), parameter


def each_parameter(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all chunks with their names, each once."""
    seen: set[int] = set()
    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def fully_qualified_name(name: str) -> str:
    """A name from a chunk, without the prefixes of torch's wrappers inside of it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@contextmanager
def parameters_replaced(
    chunks: Iterable[nn.Module], copy_of: Callable[[nn.Parameter], nn.Parameter]
) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Modules have copies of their parameters meanwhile, tied ones the same. Gives the copies, by parameter."""
    copies: dict[nn.Parameter, nn.Parameter] = {}
    with ExitStack() as after:
        for module in (module for chunk in chunks for module in chunk.modules()):
            parameters: dict[str, nn.Parameter | None] = dict(module._parameters)
            after.callback(_put_back, module, parameters)
            for name, own in parameters.items():
                if own is not None:
                    if own not in copies:
                        copies[own] = copy_of(own)
                    setattr(module, name, copies[own])
        yield copies


def _put_back(module: nn.Module, parameters: dict[str, nn.Parameter | None]) -> None:
    """The attributes are set, since some modules keep lists of their parameters up to date by them, as torch's RNNs."""
    for name in module._parameters.keys() - parameters.keys():  # made by a forward
        delattr(module, name)
    for name, parameter in parameters.items():
        setattr(module, name, parameter)


def as_list(model: Models) -> list[nn.Module]:
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):  # which is a list of chunks
        return [model]
    return list(model)


def trained_parameters(models: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The trained parameters of all chunks with their names, each once."""
    return ((name, parameter) for name, parameter in each_parameter(models) if parameter.requires_grad)


def gradients(models: Iterable[nn.Module]) -> list[Tensor]:
    """Every gradient there is, where sharded this rank's part of it."""
    found = (gradient_of(name, parameter) for name, parameter in trained_parameters(models))
    return [local(grad) for grad in found if grad is not None]


def by_dtype(tensors: Iterable[Tensor]) -> dict[torch.dtype, list[Tensor]]:
    """Tensors by dtype, for torch's functions on many at once. On an accelerator each is one kernel only where all
    tensors are of one type, a number that is a tensor included."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor)
    return groups


def gradient_of(name: str, parameter: nn.Parameter) -> Tensor | None:
    """See `gradient_like`. Raises ValueError where it is kept as `main_grad`."""
    if parameter.grad is None and getattr(parameter, "main_grad", None) is not None:
        raise ValueError(
            f"{name} has its gradient in main_grad, of another's making: leave clipping, dividing and tied weights to "
            "those who made it, or let them set .grad first."
        )
    return gradient_like(parameter)


def gradient_like(parameter: Tensor) -> Tensor | None:
    """The gradient, laid out as its parameter."""
    grad = parameter.grad
    if grad is not None and (laid_out := laid_out_like(parameter, grad)) is not grad:
        parameter.grad = grad = laid_out
    return grad


def dense(whose: str, grad: Tensor) -> Tensor:
    """The gradient itself. Raises TypeError where it is sparse."""
    if grad.layout is not torch.strided:
        raise TypeError(f"the gradient of {whose} is sparse: make it dense (sparse=False in nn.Embedding).")
    return grad


def zero_gradient(parameter: Tensor) -> Tensor:
    """Zeros in place of a gradient that is missing, in the dtype that its owner has chosen, where torch lets them."""
    return torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))


def laid_out_like(parameter: Tensor, grad: Tensor) -> Tensor:
    """Torch lays the gradient of a DTensor out otherwise: that of an embedding shared out by rows is whole on every
    rank, that of a norm in a sequence-parallel region a sum yet to be made. Collective there."""
    sharded, given = as_sharded(parameter), as_sharded(grad)
    if sharded is None or given is None or given.placements == sharded.placements:
        return grad
    return given.redistribute(placements=sharded.placements)


def device_of(models: Iterable[nn.Module]) -> torch.device:
    """The device of the first parameter, which may be frozen, or buffer; the CPU where there is none."""
    for model in models:
        for tensor in tensors_of(model):
            return tensor.device
    return torch.device("cpu")


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor, where it is a DTensor. Their module takes longer to import than this package does: that is left to
    those who make one."""
    module = sys.modules.get("torch.distributed.tensor")
    return tensor if module is not None and isinstance(tensor, module.DTensor) else None


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, as memory that both share."""
    sharded = as_sharded(tensor)
    return tensor if sharded is None else sharded.to_local()
