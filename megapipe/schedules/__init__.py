"""The schedules: one function each, whose loops are the schedule.

A schedule speaks the verbs of `Verbs` to the one object it is given, most of them through F, B, W and BW. It is the
only source of truth: training runs it, and plans, pictures and checks are made by running it on a recorder. To add one,
write the function, decorate it, draw its picture in tests/plan/test_schedules.py, and add its note to docs/generate.py.

None of them needs torch until a step runs.
"""

from .calling import ForwardBackward, get_forward_backward_func, schedule
from .letters import BW, B, F, W
from .whole_backward import (
    forward_backward_gpipe,
    forward_backward_looped_bfs,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_backward_seq1f1b,
    forward_backward_seq_interleaved_1f1b,
    forward_inference,
)

from . import zero_bubble, combined, dualpipe  # noqa: F401  # isort: skip  # registered in this order, behind the others

__all__ = [
    "BW",
    "B",
    "F",
    "ForwardBackward",
    "W",
    "forward_backward_gpipe",
    "forward_backward_looped_bfs",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_seq1f1b",
    "forward_backward_seq_interleaved_1f1b",
    "forward_inference",
    "get_forward_backward_func",
    "schedule",
]
