"""Captured stages: forward and backward of an unchanged model as graphs, to be split, compiled and multiplexed."""

from .captured import CapturedStage, capture
from .joint import CaptureError, Joint, trace_joint
from .partition import Partition, partition
from .split import SplitBackward, split_di_dw

__all__ = [
    "CaptureError",
    "CapturedStage",
    "Joint",
    "Partition",
    "SplitBackward",
    "capture",
    "partition",
    "split_di_dw",
    "trace_joint",
]
