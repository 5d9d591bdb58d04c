"""Which modules of a chunk are computed again: the whole, or its last layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from ..chunks import iter_wrapped, unwrap

__all__ = ["Region", "regions_of"]


class Region(NamedTuple):
    """A module whose calls are computed again."""

    module: nn.Module
    buffers: list[list[Tensor]]
    """Those that a call may move on, which its replay is not to do again, module by module: batch norm changes two of
    its own without autograd's knowledge, and a third with it."""

    @classmethod
    def of(cls, module: nn.Module) -> Region:
        of_modules = (
            [buffer for buffer in inner._buffers.values() if buffer is not None and not buffer.is_inference()]
            for inner in module.modules()
        )
        return cls(module, list(filter(None, of_modules)))


def regions_of(chunk: nn.Module, which: str | int, what: str) -> list[Region]:
    """The parts of a chunk that are computed again.

    Args:
        which: "all" for the chunk as a whole, or the number of its last layers: those of its outermost nn.ModuleList or
            nn.Sequential.
        what: names the chunk in errors.

    Raises:
        ValueError: there are no layers to be found.
    """
    inner = _inside_wrappers(chunk)
    if which == "all":
        return [Region.of(inner)]
    assert isinstance(which, int)
    layers = next((m for m in inner.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)), None)
    if layers is None or "_orig_mod" in inner._modules:
        why = (
            "inside of what torch.compile has made of it"
            if layers is not None
            else "without a ModuleList or Sequential"
        )
        raise ValueError(
            f"config.recompute asks for the last {which} layers of {what}, but they are not to be found in its "
            f'{type(inner).__name__}, {why}: set it to "all", or compile layers one by one.'
        )
    last = list(layers)[max(0, len(layers) - which) :]
    return list(map(Region.of, dict.fromkeys(last)))


def _inside_wrappers(chunk: nn.Module) -> nn.Module:
    """The model in its wrappers, or what torch.compile has made of it."""
    inside = unwrap(chunk)
    for module in iter_wrapped(chunk):
        if module is inside or "_orig_mod" in module._modules:
            break
    return module  # type: ignore[no-any-return]
