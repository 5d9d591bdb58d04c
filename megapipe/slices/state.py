"""Which slice of a sequence is being computed, and what its layers have kept for the slices after it.

Each slice has a graph of its own. A tensor that a slice keeps is a leaf in the graphs of the slices after it, where its
gradients add up. Slices go backward last to first, so these are complete when the slice that made the tensor begins its
backward: the tensor is then a root of that, beside the slice's output.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..messages import unshared
from ..weight_grad import this_thread


class SequenceSlice(NamedTuple):
    """A part of the sequences of one microbatch: their positions from `start` to `stop`."""

    index: int  # type: ignore[assignment]  # a tuple has a method of this name
    num_slices: int
    start: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length


def current() -> SequenceSlice | None:
    """The slice that is computed now: by forward_step_func, the model or the loss function, or again in the backward,
    by parts that do not save their activations. None where sequences are whole."""
    running = _asked()
    return None if running is None else running.slice


def cut(tensor: Tensor, dim: int) -> Tensor:
    """The current slice's part of a tensor that has a place for each position of the sequence; a view.

    Args:
        tensor: of a whole sequence, such as its tokens, labels or positions.
        dim: the sequence dimension.

    Returns:
        All of `tensor` where sequences are whole.

    Raises:
        ValueError: if `tensor` ends before the slice does.
    """
    this = current()
    if this is None:
        return tensor
    if tensor.shape[dim] < this.stop:
        raise ValueError(
            f"slice {this.index} of {this.num_slices} has positions {this.start} to {this.stop - 1}, but dimension "
            f"{dim} of a tensor of shape {list(tensor.shape)} has {tensor.shape[dim]}: cut tensors of whole sequences, "
            "once."
        )
    return tensor.narrow(dim, this.start, this.length)


def positions(length: int, device: torch.device | None = None) -> Tensor:
    """The places in the sequence of the current slice's positions, for embeddings of them or rotary ones.

    Args:
        length: how many positions the slice has, or the whole sequence where that is not cut.

    Returns:
        [length], from the start of the slice on, or from 0 where sequences are whole.
    """
    this = current()
    start = 0 if this is None else this.start
    return torch.arange(start, start + length, device=device)


def earlier(key: Hashable) -> list[tuple[Tensor, ...]]:
    """What earlier slices of this microbatch have kept under `key`, in their order. Empty in the first slice, and where
    sequences are whole.

    Returns:
        Tensors of the same values as those kept, which require gradients where those did.

    Raises:
        RuntimeError: if one of them has been changed in place since.
    """
    running = _asked()
    return [] if running is None else running.state.kept_before(running.slice.index, key)


def keep(key: Hashable, *tensors: Tensor) -> None:
    """Let later slices of this microbatch have `tensors`; gradients flow back from there. They must not be changed in
    place afterwards. Does nothing where sequences are whole, and where a part of the model is computed again in the
    backward.

    Args:
        key: whose they are, such as the layer (`self`): once in each slice.

    Raises:
        RuntimeError: if this slice has kept something under `key` before.
    """
    running = _asked()
    if running is not None:
        running.state.keep(running, key, tensors)


class _Running(NamedTuple):
    state: CarriedState
    slice: SequenceSlice
    is_backward: bool


def _asked() -> _Running | None:
    running: _Running | None = this_thread().slice
    if running is not None:
        running.state.was_asked = True
    return running


class _Kept:
    """A tensor that one slice keeps for those after it."""

    def __init__(self, tensor: Tensor, needs_grad: bool) -> None:
        self.edge: GradientEdge | None = None
        self.leaf = tensor.detach()
        self._version = None if tensor.is_inference() else tensor._version
        if not needs_grad:
            return
        if tensor.requires_grad:
            with torch.enable_grad():  # of a view, since a Python Function's node goes with its outputs
                edge = get_gradient_edge(tensor.view_as(tensor))
            if edge.node.next_functions[0][0] is not None:  # it leads nowhere from a view made under no_grad
                self.edge = edge
            self.leaf.requires_grad_()
        elif not torch.is_grad_enabled() and tensor.is_floating_point():
            self.leaf.requires_grad_()  # it may get a graph in the backward, by reentrant checkpointing
        if self.leaf.requires_grad:
            self.leaf.register_post_accumulate_grad_hook(_own_gradient)  # type: ignore[no-untyped-call]

    def has_changed(self) -> bool:
        """Whether its memory was written to since. Of tensors made in inference mode torch does not know."""
        return self._version is not None and self.leaf._version != self._version

    def give_back(self, tensor: Tensor) -> None:
        """Add the gradient of later slices to that of `tensor`, which is this one computed again."""
        grad = self.leaf.grad
        if self.edge is None and grad is not None and tensor.requires_grad:
            tensor.register_hook(self._add)  # type: ignore[no-untyped-call]

    def _add(self, grad: Tensor) -> Tensor:
        carried, self.leaf.grad = self.leaf.grad, None
        return grad if carried is None else grad + carried


def _own_gradient(leaf: Tensor) -> None:
    """Autograd may make views of the same memory the gradients of several leaves, as in `torch.stack(leaves).sum(0)`.
    Those of the slices before are then added in place."""
    if leaf.grad is not None:  # a Function may have returned none
        leaf.grad = unshared(leaf.grad)


class CarriedState:
    """What the slices of one microbatch keep for each other in one chunk of the model. It is made before the first
    forward of the microbatch and dropped after the last backward, or the last forward if there is none.

    Args:
        needs_grad: there will be backwards.
    """

    def __init__(self, needs_grad: bool) -> None:
        self.was_asked = False
        """Somebody wanted to know of the slice: else each would compute the whole sequence."""
        self._needs_grad = needs_grad
        self._kept: dict[int, dict[Hashable, tuple[_Kept | None, ...]]] = {}
        """The gradients that are left, without those that `roots` has given back."""

    def forward(self, slice: SequenceSlice) -> AbstractContextManager[None]:
        """Around what computes a slice: forward_step_func and the loss function."""
        self._kept[slice.index] = {}
        return _Computing(_Running(self, slice, is_backward=False))

    def backward(self, slice: SequenceSlice) -> AbstractContextManager[None]:
        """Around the backward of a slice, for the parts of it that are computed again. What the slice kept is freed.

        Raises:
            RuntimeError: if something that the slice kept has got gradients from later slices and takes no part in its
                backward.
        """
        return _Computing(_Running(self, slice, is_backward=True))

    def again(self, slice: SequenceSlice) -> AbstractContextManager[None]:
        """Around parts of a slice that are computed again before its backward."""
        return _Computing(_Running(self, slice, is_backward=True), is_end=False)

    def end_backward(self, slice: SequenceSlice) -> None:
        """Free what the slice kept. Raises what `backward` raises."""
        for key, kept in self._kept.pop(slice.index).items():
            if any(one is not None and one.edge is None and one.leaf.grad is not None for one in kept):
                raise RuntimeError(
                    f"slice {slice.index} of {slice.num_slices} kept tensors under {_name(key)} without a graph, so "
                    "that gradients of later slices are lost: keep them where gradients are recorded, or detach what "
                    "`earlier` returns."
                )

    def roots(self, index: int) -> list[tuple[GradientEdge, Tensor]]:
        """Where the backward of slice `index` begins besides the slice's output, with which gradients: those that later
        slices have added up. They are freed here."""
        kept = self._kept[index]
        ends = [one for tensors in kept.values() for one in tensors if one is not None and one.edge is not None]
        for key, tensors in kept.items():
            kept[key] = tuple(one if one is not None and one.edge is None else None for one in tensors)
        return [(one.edge, one.leaf.grad) for one in ends if one.edge is not None and one.leaf.grad is not None]

    def kept_before(self, index: int, key: Hashable) -> list[tuple[Tensor, ...]]:
        slices = [(earlier, self._kept[earlier][key]) for earlier in range(index) if key in self._kept[earlier]]
        for earlier, kept in slices:
            for one in kept:
                if one is not None and one.has_changed():
                    raise RuntimeError(
                        f"a tensor of shape {list(one.leaf.shape)}, kept under {_name(key)} by slice {earlier}, was "
                        "changed in place since: keep a clone() of it."
                    )
        return [tuple(one.leaf for one in kept if one is not None) for _, kept in slices]

    def keep(self, running: _Running, key: Hashable, tensors: tuple[Tensor, ...]) -> None:
        this = running.slice
        if this.index == this.num_slices - 1:
            return
        kept = self._kept[this.index]
        if running.is_backward:
            for one, tensor in zip(kept.get(key, ()), tensors):
                if one is not None:
                    one.give_back(tensor)
            return
        if key in kept:
            raise RuntimeError(
                f"slice {this.index} of {this.num_slices} has kept something under {_name(key)} already: keep once per "
                "slice under each key."
            )
        kept[key] = tuple(_Kept(tensor, self._needs_grad) for tensor in tensors)


class _Computing(AbstractContextManager[None]):
    """While a slice is computed. A class, since a generator costs the host four times as many calls in each F and B."""

    def __init__(self, running: _Running, is_end: bool = True) -> None:
        self._own = running
        self._ends_backward = running.is_backward and is_end

    def __enter__(self) -> None:
        self._thread = this_thread()
        self._before, self._thread.slice = self._thread.slice, self._own

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._thread.slice = self._before
        if self._ends_backward and kind is None:
            self._own.state.end_backward(self._own.slice)


def _name(key: Hashable) -> str:
    return f"the key of a {type(key).__name__}" if isinstance(key, torch.nn.Module) else f"the key {key!r}"
