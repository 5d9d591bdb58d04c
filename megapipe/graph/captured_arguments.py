"""The arguments that a stage was captured with, and whether those of a call are like them.

A graph is right for tensors of the shapes that it was made with, and for nothing else: everything that is not a tensor
became part of it. So each call is compared before it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


class TensorTree(NamedTuple):
    """Nested containers, with tensors in some places and fixed values in all others."""

    spec: TreeSpec
    fixed: dict[int, Any]
    """The fixed values, by their place among all leaves."""

    @classmethod
    def of(cls, value: Any) -> tuple[TensorTree, list[Tensor]]:
        leaves, spec = tree_flatten(value)
        fixed = {place: leaf for place, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)}
        return cls(spec, fixed), [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def fill(self, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        places = range(self.spec.num_leaves)
        return tree_unflatten([self.fixed[n] if n in self.fixed else next(rest) for n in places], self.spec)

    def find_opaque(self) -> Any:
        """One of the fixed values that has tensors in it, which torch's pytrees do not know; None where none has."""
        return next((leaf for leaf in self.fixed.values() if _has_tensors(leaf)), None)


def _has_tensors(value: Any) -> bool:
    """Whether an object has some in its attributes."""
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    return bool(TensorTree.of([getattr(value, "__dict__", None), [getattr(value, name, None) for name in slots]])[1])


class Arguments:
    """The arguments of a stage, flat.

    Args:
        example: any nested containers of tensors and other values.
        what: names the stage in errors.
    """

    def __init__(self, example: Any, what: str) -> None:
        self.structure, tensors = TensorTree.of(example)
        self._what = what
        self._outline = _outline(example)
        self.examples = [_Meta(t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]
        self.strides = [tensor.stride() for tensor in tensors]

    def tensors(self, value: Any) -> list[Tensor]:
        """The tensors of `value`, in the layout of the example's.

        Raises:
            ValueError: `value` is not like the example.
        """
        structure, tensors = TensorTree.of(value)
        if structure.spec != self.structure.spec or structure.fixed.keys() != self.structure.fixed.keys():
            raise self._differs(_outline(value), self._outline)
        for place, fixed in structure.fixed.items():
            expected = self.structure.fixed[place]
            if fixed is not expected and (type(fixed) is not type(expected) or fixed != expected):
                raise self._differs(f"the value {fixed!r}", repr(expected))
        for number, (tensor, example) in enumerate(zip(tensors, self.examples)):
            if tensor.shape != example.shape or tensor.dtype != example.dtype or tensor.device != example.device:
                raise self._differs(f"tensor {number} as {_describe(tensor)}", _describe(example))
            if tensor.requires_grad and not example.requires_grad and torch.is_grad_enabled():
                raise self._differs(f"tensor {number} with requires_grad", "one without")
        return [laid_out(tensor, stride) for tensor, stride in zip(tensors, self.strides)]

    def _differs(self, given: str, captured: str) -> ValueError:
        return ValueError(
            f"{self._what} was captured with {captured}, but called with {given}, which its graph cannot tell apart: "
            "call it with what it was captured with, or leave this stage eager."
        )


class _Meta(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """`tensor`, copied if its strides are others: views in a graph, and compiled code, go by them."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _describe(tensor: _Meta | Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"[{', '.join(map(str, tensor.shape))}] {dtype} on {tensor.device}"


class _Outlined:
    def __repr__(self) -> str:
        return "tensor"


def _outline(value: Any) -> str:
    """(input from the stage before, positional arguments, keyword arguments, target of the loss)"""
    structure, tensors = TensorTree.of(value)
    return repr(structure.fill([_Outlined()] * len(tensors)))  # type: ignore[list-item]
