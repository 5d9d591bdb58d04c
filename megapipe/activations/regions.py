"""Which modules of a chunk are computed again: the whole, or its last layers."""

from __future__ import annotations

from torch import nn

from ..chunks import iter_wrapped, unwrap

__all__ = ["regions_of"]


def regions_of(chunk: nn.Module, which: str | int, what: str) -> list[nn.Module]:
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
        return [inner]
    assert isinstance(which, int)
    layers = next((m for m in inner.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)), None)
    if layers is None or _runs_as_graphs(inner):
        why = "without a ModuleList or Sequential" if layers is None else "which runs as compiled or captured graphs"
        raise ValueError(
            f"config.recompute asks for the last {which} layers of {what}, but they are not to be found in its "
            f'{type(inner).__name__}, {why}: set it to "all", or compile layers one by one.'
        )
    last = list(layers)[max(0, len(layers) - which) :]
    return list(dict.fromkeys(last))


def _inside_wrappers(chunk: nn.Module) -> nn.Module:
    """The model in its wrappers, or what runs as graphs of it."""
    inside = unwrap(chunk)
    for module in iter_wrapped(chunk):
        if module is inside or _runs_as_graphs(module):
            break
    return module  # type: ignore[no-any-return]


def _runs_as_graphs(module: nn.Module) -> bool:
    """Whether torch.compile or `graph.capture` has made graphs of it: modules within are not called then."""
    return "_orig_mod" in module._modules or "_megapipe_graphs" in vars(module)
