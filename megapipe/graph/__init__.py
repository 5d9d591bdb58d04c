"""Captured stages: forward and backward of an unchanged model as graphs, to be split, compiled and multiplexed."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .backward_split import SplitBackward, WeightGradient, split_di_dw
    from .captured import CapturedStage, capture
    from .compile import compile_graph
    from .errors import CaptureError
    from .fsdp_collectives import ShardedJoint, split_fsdp_collectives
    from .joint_graph import Joint, trace_joint
    from .multiplexing import multiplex
    from .partitioning import Partition, partition, recompute
    from .side_effects import setting_no_random_state

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

__getattr__, __dir__ = names_on_first_use(__name__)
