"""The messages between stages: tensors in containers, their specs, and headers that carry a spec."""

from __future__ import annotations

import functools
import json
import math
from typing import Any, NamedTuple

import torch

from .trees import KEYS, describe, holds_values, rebuild, show

# The container of a message: "tensor", "list" or "tuple", or the keys of a dict, if it holds nothing but tensors. For
# any other message it is the text of `trees.describe`, which begins with a bracket.
Structure = str | tuple[str | int, ...]


class TensorSpec(NamedTuple):
    """One tensor of a message. Equal specs mean equal sizes in bytes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool
    """Whether a gradient comes back for it."""

    def __str__(self) -> str:
        without = "" if self.differentiable or not can_have_gradient(self.dtype) else " without gradient"
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}{without}"


def can_have_gradient(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class MessageSpec(NamedTuple):
    """What a receiver must know about a message before it arrives: its container, and the shapes and dtypes."""

    structure: Structure
    tensors: tuple[TensorSpec, ...]

    @property
    def nbytes(self) -> int:
        """The size of its tensors, in bytes."""
        return _nbytes(self.tensors)

    def gradient_spec(self) -> MessageSpec:
        """The spec of the message that carries the gradients of this one back."""
        return MessageSpec("list", tuple(t for t in self.tensors if t.differentiable))

    def may_change(self, forward_only: bool) -> bool:
        """Whether a later message with the same sizes may differ: require a gradient for a tensor that has none here,
        or hold other plain values."""
        without = any(can_have_gradient(t.dtype) and not t.differentiable for t in self.tensors)
        return (without and not forward_only) or (isinstance(self.structure, str) and holds_values(self.structure))

    def fits(self, structure: Structure, tensors: list[torch.Tensor]) -> bool:
        """Whether a message with these tensors may be sent to a receiver that expects this spec."""
        if structure != self.structure or len(tensors) != len(self.tensors):
            return False
        for tensor, (shape, dtype, differentiable) in zip(tensors, self.tensors):
            if tensor.shape != shape or tensor.dtype != dtype or (tensor.requires_grad and not differentiable):
                return False
        return True

    def matches(self, other: MessageSpec) -> bool:
        """Same structure, shapes and dtypes."""
        return self.structure == other.structure and self.sizes == other.sizes

    @property
    def sizes(self) -> list[tuple[Any, ...]]:
        """The shapes and dtypes of its tensors."""
        return [tensor[:2] for tensor in self.tensors]

    def __str__(self) -> str:
        tensors = [str(t) for t in self.tensors]
        if self.structure == "tensor":
            return tensors[0]
        if isinstance(self.structure, tuple):
            return "{" + ", ".join(f"{key!r}: {t}" for key, t in zip(self.structure, tensors)) + "}"
        if self.structure.startswith("["):
            return show(self.structure, tensors)
        return f"{self.structure} of " + (", ".join(tensors) or "nothing")


@functools.lru_cache(maxsize=256)
def _nbytes(tensors: tuple[TensorSpec, ...]) -> int:
    return sum(math.prod(t.shape) * t.dtype.itemsize for t in tensors)


def pack(message: Any) -> tuple[Structure, list[torch.Tensor]]:
    """A message as its structure and its tensors. A list of one tensor counts as that tensor.

    Raises:
        TypeError: it holds other objects than containers, tensors and plain values. The text is to complete the
            sentence "the output ... cannot be sent on: ".
    """
    if isinstance(message, torch.Tensor):
        return "tensor", [message]
    container = type(message)
    if container is tuple or container is list:
        tensors: list[Any] = list(message)
        structure: Structure = "tuple" if container is tuple else "tensor" if len(tensors) == 1 else "list"
    elif container is dict:
        structure, tensors = tuple(message), list(message.values())
        if not all(type(key) in KEYS for key in structure):
            return describe(message)  # which says what is wrong
    else:
        return describe(message)
    if all(isinstance(item, torch.Tensor) for item in tensors):
        return structure, tensors
    return describe(message)


def check_sendable(tensor: torch.Tensor, device: torch.device) -> None:
    """Check that a tensor is plain memory on a device of this type: transports can send nothing else.

    Raises:
        TypeError: it is not. The text is to complete the sentence "the output ... cannot be sent on: ".
    """
    what = None
    if tensor.is_nested:
        what = "nested"
    elif tensor.layout is not torch.strided:
        what = f"of layout {str(tensor.layout).removeprefix('torch.')}"
    elif tensor.is_quantized:
        what = "quantized"
    elif tensor.device != device and tensor.device.type != device.type:
        what = f"on {tensor.device}, but the model is on {device}"
    elif type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        what = f"a {type(tensor).__name__}, which keeps its values in other tensors"
    if what is not None:
        raise TypeError(f"a tensor of it is {what}: only plain memory can be sent")


def unshared(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or a copy of it if others hold its memory too and may write to it: autograd (as some
    parameter's `.grad`), a Function that uses its result again, or a model that keeps its output."""
    storage = tensor.untyped_storage()
    return tensor.clone() if torch._C._storage_Use_Count(storage._cdata) > 2 else tensor  # one is `storage`


def unpack(structure: Structure, tensors: list[torch.Tensor]) -> Any:
    """The inverse of `pack`."""
    if structure == "tensor":
        return tensors[0]
    if structure == "list":
        return tensors
    if structure == "tuple":
        return tuple(tensors)
    if isinstance(structure, tuple):
        return dict(zip(structure, tensors))
    return rebuild(structure, tensors)


# With dynamic shapes a header precedes each message: its spec as JSON in a buffer of fixed size, always on CPU, so that
# reading it never makes the host wait for a device.

HEADER = MessageSpec("tensor", (TensorSpec((1024,), torch.uint8, False),))


@functools.lru_cache(maxsize=256)
def encode_header(spec: MessageSpec) -> torch.Tensor:
    """Returns a spec as a header: a tensor of 1024 bytes.

    Raises:
        ValueError: the spec does not fit.
    """
    tensors = [(t.shape, str(t.dtype).removeprefix("torch."), t.differentiable) for t in spec.tensors]
    text = json.dumps([spec.structure, tensors], separators=(",", ":")).encode()
    (size,) = HEADER.tensors[0].shape
    if len(text) > size:
        num_bytes = len(json.dumps(spec.structure))
        remedy = "send fewer tensors, as with torch.stack"
        if 2 * num_bytes > len(text):
            remedy = "shorten its keys, and send long texts and many numbers as a tensor"
        raise ValueError(
            f"a message is described in {size} bytes, but the containers, keys, texts and numbers of this one take "
            f"{num_bytes}, and the shapes of its {len(tensors)} tensor(s) {len(text) - num_bytes}: {remedy}."
        )
    return torch.frombuffer(bytearray(text.ljust(size)), dtype=torch.uint8)


def decode_header(header: torch.Tensor) -> MessageSpec:
    """Returns the spec that a header holds."""
    return _parse_header(bytes(header.tolist()))


@functools.lru_cache(maxsize=256)
def _parse_header(text: bytes) -> MessageSpec:
    structure, tensors = json.loads(text)
    return MessageSpec(
        tuple(structure) if isinstance(structure, list) else structure,
        tuple(TensorSpec(tuple(shape), getattr(torch, dtype), diff) for shape, dtype, diff in tensors),
    )
