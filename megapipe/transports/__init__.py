"""How messages travel between ranks: over gloo between hosts, over NCCL between devices, or by way of host memory."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .channel import Members
    from .choice import is_capturing, make_transport
    from .gloo import GlooTransport

__all__: list[str] = []

__getattr__, __dir__ = names_on_first_use(__name__)
