"""How messages travel between ranks: over gloo between hosts, over NCCL between devices, or by way of host memory."""

from .backends import MARKS, GlooTransport, Members, NcclTransport
from .staging import STAGINGS, StagedTransport

__all__ = [
    "MARKS",
    "STAGINGS",
    "GlooTransport",
    "Members",
    "NcclTransport",
    "StagedTransport",
]
