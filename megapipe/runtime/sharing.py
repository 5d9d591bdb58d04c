"""Broadcast of a nested value at the end of a step, such as the reports of the last stage.

Structure, numbers, shapes and dtypes go through the mailbox, where the wait notices failures. The tensors on the device
are broadcast, one message for each dtype. The host never waits for the device.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import trees
from ..failures import Mailbox


def share(
    value: Any,
    group: dist.ProcessGroup,
    mailbox: Mailbox,
    step: int,
    before: int | None,
    source: int,
    device: torch.device,
    what: str = "results",
) -> Any:
    """Rank `source`'s value, on every rank. All ranks of `group` call it at the end of a step.

    Args:
        value: ignored on the other ranks.
        step: the number of this step, the same on all ranks.
        before: the last step in which they called it for this `what`; None if there is none.
        source: a rank in `group`.
        device: of the tensors that are broadcast. Tensors on other devices travel with the numbers and texts.
        what: tells values of the same step apart.

    Raises:
        TypeError: the value holds more than numbers, texts, tensors and containers of them.
        PipelineError: a rank failed before it came here.
    """
    name = f"{what} of step {step}"
    if group.rank() == source:
        structure, tensors = _describe(value)
        described = [_Described.of(tensor, device) for tensor in tensors]
        tensors = [_values_of(tensor) for tensor in tensors]
        mailbox.post(name, json.dumps([structure, described]))
        if before is not None:
            mailbox.withdraw(f"{what} of step {before}")  # each has begun this step since
    else:
        structure, fields = json.loads(mailbox.collect_from(source, name))
        described = [_Described(*each) for each in fields]
        tensors = [each.build(device) for each in described]
    to_broadcast = [tensor.detach() for tensor, each in zip(tensors, described) if each.values is None]
    for dtype in dict.fromkeys(tensor.dtype for tensor in to_broadcast):
        alike = [tensor for tensor in to_broadcast if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat.view(torch.uint8), dist.get_global_rank(group, source), group)
        if group.rank() != source:
            for tensor, part in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike])):
                tensor.copy_(part.view_as(tensor))
    if group.rank() != source:
        (value,) = trees.rebuild(structure, [each.complete(tensor) for each, tensor in zip(described, tensors)])
    return value


def _values_of(tensor: Tensor) -> Tensor:
    """The tensor itself; the values of a nested one."""
    return tensor.values() if tensor.is_nested else tensor


def _describe(value: Any) -> tuple[str, list[Tensor]]:
    try:
        return trees.describe([value])  # in a list, since a message is no plain value
    except (TypeError, RecursionError) as error:
        raise TypeError(
            f"what the loss function reports goes to another rank, but cannot be sent there ({error}): let it "
            "return numbers, texts and tensors, in dicts, lists or tuples."
        ) from None


class _Described(NamedTuple):
    """A tensor, as JSON can hold it."""

    shape: list[int]
    dtype: str
    values: Any
    """None of one on the device, which is broadcast."""
    offsets: list[int] | None
    """Where the parts of a nested tensor begin among its values."""

    @classmethod
    def of(cls, tensor: Tensor, device: torch.device) -> _Described:
        offsets = tensor.offsets().tolist() if tensor.is_nested else None  # type: ignore[attr-defined]
        tensor = _values_of(tensor)
        values = None if tensor.device.type == device.type else tensor.tolist()
        return cls(list(tensor.shape), str(tensor.dtype).removeprefix("torch."), values, offsets)

    def build(self, device: torch.device) -> Tensor:
        """The tensor again; an empty one where it is broadcast."""
        dtype = getattr(torch, self.dtype)
        if self.values is None:
            return torch.empty(self.shape, dtype=dtype, device=device)
        return torch.tensor(self.values, dtype=dtype).view(self.shape)

    def complete(self, tensor: Tensor) -> Tensor:
        """What was described, of the values that have come."""
        if self.offsets is None:
            return tensor
        return torch.nested.nested_tensor_from_jagged(tensor, torch.tensor(self.offsets, device=tensor.device))
