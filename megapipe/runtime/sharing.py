"""Broadcast of a nested value at the end of a step, such as the reports of the last stage.

Structure, numbers, shapes and dtypes go through the mailbox, where the wait notices failures. The tensors on the device
are broadcast, one message for each dtype. The host never waits for the device.
"""

from __future__ import annotations

import io
import pickle
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
    if group.rank() == source:
        pickler = _TensorsApart(device)
        mailbox.post(name, pickler.dump_text(value))
        mailbox.withdraw(f"{what} of step {step - 1}")  # each has begun this step since
        tensors = pickler.tensors
    else:
        unpickler = _TensorsToCome(mailbox.collect_from(source, name), device)
        value = unpickler.load()
        tensors = unpickler.tensors
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1) for tensor in alike])
        dist.broadcast(flat, dist.get_global_rank(group, source), group)
        if group.rank() != source:
            for tensor, part in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike])):
                tensor.copy_(part.view_as(tensor))
    return value


class _TensorsApart(pickle.Pickler):
    """Leaves out the tensors of a device, and lists them."""

    def __init__(self, device: torch.device) -> None:
        self._file = io.BytesIO()
        super().__init__(self._file)
        self._device = device
        self.tensors: list[Tensor] = []

    def dump_text(self, value: Any) -> str:
        try:
            self.dump(value)
            text = self._file.getvalue().hex()
            _TensorsToCome(text, self._device).load()  # as the others will
        except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"what the loss function reports goes to another rank, but cannot be sent there ({error}): let it "
                "return numbers, texts and tensors, in dicts, lists or tuples."
            ) from None
        return text

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        dtype = str(value.dtype).removeprefix("torch.")
        if value.device.type != self._device.type:
            return tuple(value.shape), dtype, value.tolist()
        self.tensors.append(value.detach())
        return tuple(value.shape), dtype, None


class _TensorsToCome(pickle.Unpickler):
    """Puts empty tensors where tensors were left out, and lists them."""

    def __init__(self, text: str, device: torch.device) -> None:
        super().__init__(io.BytesIO(bytes.fromhex(text)))
        self._device = device
        self.tensors: list[Tensor] = []

    def persistent_load(self, description: Any) -> Tensor:
        shape, dtype, values = description
        if values is not None:
            return torch.tensor(values, dtype=getattr(torch, dtype)).view(shape)
        self.tensors.append(torch.empty(shape, dtype=getattr(torch, dtype), device=self._device))
        return self.tensors[-1]

    def find_class(self, module: str, name: str) -> Any:
        """Text from a store may not name functions to call."""
        raise pickle.UnpicklingError(f"{module}.{name}")
