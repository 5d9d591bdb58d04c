"""Captured stages: forward and backward of an unchanged model as graphs, to be split, compiled and multiplexed."""

from .captured import CapturedStage, capture
from .compile import compile_graph
from .fsdp_collectives import ShardedJoint, split_fsdp_collectives
from .joint import CaptureError, Joint, trace_joint
from .multiplex import multiplex
from .partition import Partition, partition
from .recompute import recompute
from .split import SplitBackward, WeightGradient, split_di_dw

__all__ = [
    "CaptureError",
    "CapturedStage",
    "Joint",
    "Partition",
    "ShardedJoint",
    "SplitBackward",
    "WeightGradient",
    "capture",
    "compile_graph",
    "multiplex",
    "partition",
    "recompute",
    "split_di_dw",
    "split_fsdp_collectives",
    "trace_joint",
]
