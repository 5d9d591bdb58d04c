"""What takes the place of the tensors that a forward saves for its backward. Tensors that come back are compared to the
last bit without being kept: each by a number that depends on all of its bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


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


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PIECE = 2**20
"""Elements that are looked at together, so that it takes little memory."""
_ODD, _OTHER = 6364136223846793005, 1442695040888963407


class Fingerprint(NamedTuple):
    kind: str
    """The dtype and the shape."""
    number: Tensor
    """Lies on the tensor's device, so that nobody waits for it."""

    @classmethod
    def of(cls, tensor: Tensor) -> Fingerprint:
        with torch.no_grad():
            return cls(f"{tensor.dtype} of shape {list(tensor.shape)}", _number(tensor))


def _number(tensor: Any) -> Tensor:
    """The sum of all elements, as integers, each times a number of its place, modulo 2**64."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        return torch.stack([_number(getattr(tensor, name)) for name in names]).sum()
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor.resolve_neg()
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.numel():  # one element in many places
            tensor = tensor.narrow(dim, 0, 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in torch.split(tensor.reshape(-1).view(_WORDS[tensor.itemsize]), _PIECE):
        place = torch.arange(1, piece.numel() + 1, device=piece.device) * _ODD
        total = total * _OTHER + (piece.long() * ((place ^ (place >> 31)) * _OTHER | 1)).sum()
    return total


def first_difference(pairs: Iterable[tuple[Fingerprint, Fingerprint]]) -> str | None:
    """The kind of the first tensor that is not what it was, as it was; None where all are. Waits for the device."""
    pairs = list(pairs)
    if not pairs:
        return None
    were, are = (torch.stack([one.number for one in side]).cpu().tolist() for side in zip(*pairs))
    for (before, after), was, now in zip(pairs, were, are):
        if (before.kind, was) != (after.kind, now):
            return before.kind
    return None
