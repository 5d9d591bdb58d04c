"""How messages travel between ranks: over gloo between hosts, over NCCL between devices, or by way of host memory."""

from .channel import Members
from .choice import is_capturing, make_transport
from .gloo import GlooTransport

__all__ = [
    "GlooTransport",
    "Members",
    "is_capturing",
    "make_transport",
]
