"""Broadcast of a nested value at the end of a step, such as the reports of the last stage.

Structure, numbers, shapes and dtypes go through the mailbox, where the wait notices failures. The tensors on the device
are broadcast, one message for each dtype. The host never waits for the device.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..failures import Mailbox

__all__ = ["share"]


def share(
    value: Any,
    group: dist.ProcessGroup,
    mailbox: Mailbox,
    step: int,
    source: int,
    device: torch.device,
    what: str = "results",
) -> Any:
    """Rank `source`'s value, on every rank. All ranks of `group` call it at the end of a step.

    Args:
        value: ignored on the other ranks.
        step: the number of this step, the same on all ranks.
        source: a rank in `group`.
        device: of the tensors that are broadcast. Tensors on other devices travel with the numbers and texts.
        what: tells values of the same step apart.

    Raises:
        TypeError: the value holds more than numbers, texts, tensors and containers of them.
        PipelineError: a rank failed before it came here.
    """
    name = f"{what} of step {step}"
    tensors: list[Tensor] = []
    if group.rank() == source:
        mailbox.post(name, _describe_all(value, device, tensors))
        mailbox.withdraw(f"{what} of step {step - 1}")  # each has begun this step since
    else:
        value = _build(json.loads(mailbox.collect_from(source, name)), device, tensors)
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, dist.get_global_rank(group, source), group)
        if group.rank() != source:
            for tensor, part in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike])):
                tensor.copy_(part.view_as(tensor))
    return value


def _describe_all(value: Any, device: torch.device, tensors: list[Tensor]) -> str:
    try:
        return json.dumps(_describe(value, device, tensors))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"what the loss function reports goes to another rank, but cannot be sent there ({error}): let it "
            "return numbers, texts and tensors, in dicts, lists or tuples."
        ) from None


def _describe(value: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    """The value as JSON can hold it: numbers and texts as they are, all else a list that begins with its type. Tensors
    on `device` are left out, and put into `tensors`."""
    if isinstance(value, Tensor):
        is_apart = value.device.type == device.type
        if is_apart:
            tensors.append(value.detach())
        values = None if is_apart else value.tolist()
        return ["Tensor", list(value.shape), str(value.dtype).removeprefix("torch."), values]
    if type(value) in (type(None), bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_describe(item, device, tensors) for item in value)]
    if type(value) is dict:
        items = value.items()
        return ["dict", *([_describe(key, device, tensors), _describe(item, device, tensors)] for key, item in items)]
    raise TypeError(f"it holds a {type(value).__name__}")


def _build(described: Any, device: torch.device, tensors: list[Tensor]) -> Any:
    """The value again, with empty tensors where some were left out."""
    if not isinstance(described, list):
        return described
    kind, *items = described
    if kind == "Tensor":
        shape, name, values = items
        dtype = getattr(torch, name)
        if values is not None:
            return torch.tensor(values, dtype=dtype).view(shape)
        tensors.append(torch.empty(shape, dtype=dtype, device=device))
        return tensors[-1]
    if kind == "dict":
        return {_build(key, device, tensors): _build(item, device, tensors) for key, item in items}
    values = [_build(item, device, tensors) for item in items]
    return tuple(values) if kind == "tuple" else values
