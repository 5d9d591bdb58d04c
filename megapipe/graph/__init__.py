"""Captured stages: forward and backward of an unchanged model as graphs, to be split, compiled and multiplexed."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .captured import CapturedStage, capture
    from .compile import compile_graph
    from .joint import CaptureError, Joint, trace_joint
    from .multiplexing import multiplex
    from .partitioning import Partition, partition, recompute
    from .split import SplitBackward, WeightGradient, split_di_dw

__all__ = [
    "CaptureError",
    "CapturedStage",
    "Joint",
    "Partition",
    "SplitBackward",
    "WeightGradient",
    "capture",
    "compile_graph",
    "multiplex",
    "partition",
    "recompute",
    "split_di_dw",
    "trace_joint",
]

__getattr__, __dir__ = names_on_first_use(__name__)
