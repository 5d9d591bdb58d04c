"""Forwards and backwards of two microbatches that run in each other's waits for communication, on one thread.

A forward that communicates is a generator: it yields when it has started a communication and is about to wait for it.
A backward is autograd's and cannot be interrupted, but the backward of a communication has an *overlap window* between
its start and its wait, in which it calls back: the callback runs the forward to its next yield. So each computes while
the other's data is on its way, and every rank does so in the same order.
"""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .collectives import Pending, start_all_gather, start_all_reduce, start_all_to_all, start_reduce_scatter
    from .segments import Segments, find_forward_segments, in_segments, run_segments
    from .windows import fill_window, filling_windows, wait_in_window

__all__ = [
    "Pending",
    "in_segments",
    "run_segments",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_reduce_scatter",
]

__getattr__, __dir__ = names_on_first_use(__name__)
