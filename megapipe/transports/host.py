"""Messages between devices by way of host memory: copied out, carried by gloo and copied in, while the host waits.

It asks for neither NCCL nor peer access, and several ranks may share one device. It is there to develop with one GPU,
and so simple rather than fast: the host runs no further ahead of the device than on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..messages import MessageSpec
from ..p2p_communication import Channel, Transfer
from ..plan import ChannelName
from .channel import Members
from .gloo import GlooTransport


class HostTransport(GlooTransport):
    """Carries messages between devices over gloo's channels between their hosts."""

    def __init__(self, members: Members, device: torch.device) -> None:
        super().__init__(members)
        self._device = device

    def channel(self, name: ChannelName, peer: int, sends: bool) -> Channel:
        channel = super().channel(name, peer, sends)
        return channel if name.kind == "header" else HostChannel(channel, self._device)


class HostChannel(Channel):
    def __init__(self, channel: Channel, device: torch.device) -> None:
        self._channel = channel
        self._device = device

    def send(self, tensors: list[Tensor]) -> None:
        self._channel.send([tensor.detach().cpu() for tensor in tensors])

    def receive(self, spec: MessageSpec) -> Transfer:
        return HostTransfer(self._channel.receive(spec), self._device)


class HostTransfer(Transfer):
    """A message that is copied to the device when it has arrived."""

    __slots__ = ("_device", "_transfer")

    def __init__(self, transfer: Transfer, device: torch.device) -> None:
        super().__init__(transfer.spec, [])
        self._transfer, self._device = transfer, device

    def wait(self) -> list[Tensor]:
        self.tensors = [tensor.to(self._device) for tensor in self._transfer.wait()]
        return self.tensors
