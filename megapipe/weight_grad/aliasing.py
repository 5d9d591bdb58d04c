"""Who else holds the memory of a tensor, and tensors that are kept between B and W."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref as weakref

import torch
from torch import Tensor

from .context import backward_context


class SavedTensor:
    """A tensor that a layer keeps until W. As in autograd, it is an error to change it in place before."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def get(self) -> Tensor:
        """Raises RuntimeError if the tensor was changed in place."""
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(self._tensor.shape)}, which a layer needs for its weight gradient, was "
                "changed in place between its B and its W: give each microbatch in flight memory of its own, or use a "
                "layer that defers nothing."
            )
        return self._tensor

    def copy(self) -> None:
        self._tensor = self.get().clone()
        self._version = self._tensor._version


def save_for_w(grad: Tensor) -> SavedTensor:
    """Save `grad` as it is now, for a computation that is handed to `defer`.

    Autograd may make a view of the same memory some parameter's `.grad`, as in `layer(x) + position.view(...)`, and
    add the gradients of the next microbatches to it in place. So the memory is copied if others still hold it when B
    ends. While B runs, those who keep it cannot be told from those who only pass it on.
    """
    saved = SavedTensor(grad)
    if backward_context.deferred is not None:
        backward_context.deferred.saved.append(weakref(saved))
    return saved


def copy_shared(saved: Iterable[weakref[SavedTensor]]) -> None:
    """Copy those of the tensors still in use whose memory others hold too."""
    by_storage: dict[int, tuple[torch.UntypedStorage, list[SavedTensor]]] = {}
    for tensor in filter(None, [reference() for reference in saved]):
        storage = tensor.get().untyped_storage()
        if torch._C._storage_Use_Count(storage._cdata) > 2:  # one is `storage`; the base of a view may be another
            by_storage.setdefault(storage._cdata, (storage, []))[1].append(tensor)
    for storage, tensors in by_storage.values():
        if _is_shared(storage, [tensor.get() for tensor in tensors]):
            for tensor in tensors:
                tensor.copy()


def _is_shared(storage: torch.UntypedStorage, tensors: list[Tensor]) -> bool:
    """Whether others than these tensors, and those that they are views of, hold their memory."""
    ours = {id(tensor): tensor for tensor in tensors + [tensor._base for tensor in tensors]}
    ours.pop(id(None), None)  # a tensor that is no view has no base
    return torch._C._storage_Use_Count(storage._cdata) > len(ours) + 1  # one is `storage`
