"""What a chunk has and what its parameters are called, whatever it is wrapped in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["each_parameter", "find_attribute", "named_parameters", "unwrapped", "with_inner", "without_wrappers"]

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def with_inner(chunk: Any) -> Iterator[Any]:
    """A chunk, and what its wrappers hold as `module`, and torch.compile's as `_orig_mod`, from the outside in."""
    inner = chunk
    while isinstance(inner, nn.Module):
        yield inner
        original = inner._modules.get("_orig_mod")
        inner = getattr(inner, "module", None) if original is None else original


def find_attribute(chunk: Any, name: str) -> Any:
    """The attribute of `chunk`, or of the first module inside its wrappers that has it, or None."""
    return next((getattr(inner, name) for inner in with_inner(chunk) if hasattr(inner, name)), None)


def named_parameters(chunk: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As the chunk itself names them, without what torch.compile, checkpoints and DistributedDataParallel add."""
    for name, parameter in unwrapped(chunk).named_parameters(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), parameter


def each_parameter(chunks: Iterable[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of all chunks with their names, each once."""
    seen: set[int] = set()
    for chunk in chunks:
        for name, parameter in named_parameters(chunk):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield name, parameter


def unwrapped(chunk: nn.Module) -> nn.Module:
    while True:
        inner = chunk.module if isinstance(chunk, DistributedDataParallel) else chunk._modules.get("_orig_mod")
        if inner is None:
            return chunk
        chunk = inner


def without_wrappers(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
