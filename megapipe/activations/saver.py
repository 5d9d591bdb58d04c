"""What takes the place of the tensors that a forward saves for its backward."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Saver", "as_it_is", "check_version", "saving"]


class _Saving(threading.local):
    by: Saver | None = None


_saving = _Saving()


def saving() -> Saver | None:
    """What takes the place of tensors that are saved for a backward in the call that is running; None where they are
    just kept. For Functions that keep tensors beside autograd's own."""
    return _saving.by


def as_it_is(value: Any) -> Any:
    """What a tensor is kept as where nothing takes its place."""
    return value


def check_version(what: str, shape: object, version: int, saved: int) -> None:
    """Autograd does this for tensors that it keeps itself, but has no versions of those whose place is taken.

    Raises:
        RuntimeError: a saved tensor was written to since.
    """
    if version != saved:
        raise RuntimeError(
            f"{what}: one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"a tensor of shape {shape} is at version {version}, and was saved at {saved}. Compute it out of place, or "
            "change a clone()."
        )


class Saver(saved_tensors_hooks):
    """The context of a call: autograd keeps what `pack` returns in the place of each tensor, and has it back by
    `unpack`."""

    def __init__(self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__(pack, unpack)
        self.pack, self.unpack = pack, unpack

    def __enter__(self) -> None:
        self._before, _saving.by = _saving.by, self
        super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        _saving.by = self._before
