"""How messages travel between ranks: over gloo between hosts, over NCCL between devices, or by way of host memory."""

from .channel import Members
from .choice import make_transport
from .cuda_events import CudaEvents, RecordedEvent
from .gloo import GlooTransport

__all__ = [
    "CudaEvents",
    "GlooTransport",
    "Members",
    "RecordedEvent",
    "make_transport",
]
