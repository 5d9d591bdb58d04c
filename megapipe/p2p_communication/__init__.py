"""Messages between stages: one channel per stage boundary and direction.

A channel carries one kind of message one way, and every chunk handles its microbatches in order, so the order of
sends and receives on a channel always matches, whatever the schedule does in between; a late receiver delays that
channel only. A step can therefore wait only for data, and data dependencies have no cycle.

Where a transport knows messages by their order alone (NCCL), the channels from one rank to another share a
communicator, and their receives are posted in the order in which the sender sends, which the plan tells.
"""

from .communicator import Communicator, Transport, edges_in_rounds
from .inboxes import HEADERS_AHEAD, Channel, DescribedInbox, Inbox, Lookahead
from .transfers import ConnectionLostError, Transfer

__all__ = [
    "HEADERS_AHEAD",
    "Channel",
    "Communicator",
    "ConnectionLostError",
    "DescribedInbox",
    "Inbox",
    "Lookahead",
    "Transfer",
    "Transport",
    "edges_in_rounds",
]
