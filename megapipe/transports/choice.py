"""Which transport carries the messages of a pipeline: chosen once, by its device."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..p2p_communication import Transport
from ..timing import CudaEvents
from .channel import Members
from .gloo import GlooTransport

DEVICES: dict[str, Callable[[torch.device], CudaEvents]] = {"cuda": CudaEvents}
"""Events that mark points of a device's current stream, by type of device that may hold stages."""


def make_transport(
    name: str | None, members: Members, device: torch.device, is_shared: Callable[[torch.device], bool], max_ctas: int
) -> Transport:
    """
    Args:
        name: "nccl", "host" or None, see `config.p2p_transport`.
        is_shared: whether two ranks of the pipeline are on one device. Collective.
        max_ctas: see `config.p2p_max_ctas`.
    """
    if device.type == "cpu":
        return GlooTransport(members)
    if device.type not in DEVICES:
        raise ValueError(f"pipelines run on cpu and cuda devices, but the model is on {device}.")
    if name is None:
        name = "nccl" if device.type == "cuda" and not is_shared(device) else "host"
    if name == "host":
        from .host import HostTransport

        return HostTransport(members, device)
    from .nccl import NcclTransport

    events = DEVICES[device.type](device)
    return NcclTransport(members, device, lambda: events.record().query, max_ctas)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured on the current stream: nothing runs then, and nothing can be waited for."""
    return device.type in DEVICES and torch.cuda.is_current_stream_capturing()
