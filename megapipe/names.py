"""What parameters are called, whatever a chunk is wrapped in."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["named_parameters", "unwrapped", "without_wrappers"]

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def named_parameters(chunk: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """As the chunk itself names them, without what torch.compile, checkpoints and DistributedDataParallel add."""
    for name, parameter in unwrapped(chunk).named_parameters(remove_duplicate=remove_duplicate):
        yield without_wrappers(name), parameter


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
