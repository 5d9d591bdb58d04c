"""How messages travel between ranks: over gloo between hosts, over NCCL between devices, or by way of host memory."""

from .channel import Members
from .choice import is_capturing, make_transport
from .cuda_events import CudaEvents, RecordedEvent
from .gloo import GlooTransport

__all__ = [
    "CudaEvents",
    "GlooTransport",
    "Members",
    "RecordedEvent",
    "is_capturing",
    "make_transport",
]
