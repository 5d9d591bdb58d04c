"""torch.distributed.pipelining: schedules of torch's classes, whose microbatches megapipe runs.

A script, or a trainer such as torchtitan, keeps its stages and its calls of `step` and `eval`. One line is new:

    adopt(schedule)

Or the class of the schedule is imported from here. It has the constructor of torch's, and takes any number of
microbatches. Batches are cut and merged, and losses handed out, by torch's own code.
"""

from .adopting import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    adopt,
    get_schedule_class,
)

__all__ = [
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "adopt",
    "get_schedule_class",
]
