"""Where frameworks around megapipe tie in. Each list is filled by the modules in `integrations/`, and the core calls
what it finds there, so that it knows none of them by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AroundForward", "Groups", "around_forwards", "check_config", "find_groups"]


class Groups(NamedTuple):
    """The process groups of a pipeline and its replicas."""

    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    virtual_size: int | None
    """Chunks per rank, for schedules that leave it open."""
    expert: dist.ProcessGroup | None = None
    """The ranks that share out the experts of a stage; None where each rank has all of them."""
    expert_data: dist.ProcessGroup | None = None
    """The ranks that hold the same experts; None where these are the replicas in `data`."""
    data_mesh: DeviceMesh | None = None
    """The replicas in `data` as the mesh they were made from, if they were."""


class AroundForward(NamedTuple):
    before: Callable[[int], None]
    """Called before each forward of a chunk with the microbatch."""
    after: Callable[[], None]
    """Called after each forward of a chunk."""


find_groups: list[Callable[[], Groups | None]] = []
"""Asked in turn for groups that somebody else has made, where `parallel_state` is not initialised itself."""

check_config: list[Callable[[Any], None]] = []
"""Called with `model.config` at every step; may raise ValueError."""

around_forwards: list[Callable[[nn.Module, int, torch.device], AroundForward | None]] = []
"""Asked at every step, for each chunk with the number of microbatches and the device, what to call around forwards."""
