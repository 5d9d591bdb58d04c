"""One microbatch's forward in the waits of another's backward, and the other way round, on one thread.

A forward that communicates is a generator: it yields when it has started a communication and is about to wait for it.
A backward is autograd's and cannot be interrupted, but the backward of a communication can call back: between its start
and its wait it calls the *gap*, which runs the forward to its next yield. So each computes while the other's data is on
its way, and every rank does so in the same order.
"""

from .all_to_all import PendingAllToAll, start_all_to_all
from .gaps import fill_gap, filling_gaps
from .parts import Parts, find_forward_parts, in_parts, run_parts
from .stand_in import call_in_parts, note_call

__all__ = [
    "Parts",
    "PendingAllToAll",
    "call_in_parts",
    "fill_gap",
    "filling_gaps",
    "find_forward_parts",
    "in_parts",
    "note_call",
    "run_parts",
    "start_all_to_all",
]
