"""Schedules of torch.distributed.pipelining, without ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed.pipelining.schedules as theirs

from megapipe.proving.torchs import OLD, RUNS_OVER_GLOO

against_torch = pytest.mark.skipif(not RUNS_OVER_GLOO, reason=OLD)

V_SHAPED = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
OF_ONE_CHUNK = ("ScheduleGPipe", "Schedule1F1B")


def torchs_schedule(name: str, pp_size: int, num_microbatches: int) -> Any:
    """That of rank 0. With one chunk or two."""
    num_chunks = 1 if name in OF_ONE_CHUNK else 2

    def stage(index: int) -> Any:
        sizes = {"num_stages": pp_size * num_chunks, "group_size": pp_size, "group_rank": 0, "stage_index": index}
        ends = {"is_first": index == 0, "is_last": index == pp_size * num_chunks - 1, "has_backward": True}
        return SimpleNamespace(**sizes, **ends, group=None, device="cpu", submod=None)

    stages = [stage(0), stage(2 * pp_size - 1 if name in V_SHAPED else pp_size)]
    return getattr(theirs, name)(stages if num_chunks == 2 else stages[0], num_microbatches)


def torch_order(schedule: Any) -> list[list[str]]:
    """Per rank, its actions as text, without idle steps and the reduction of gradients."""
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    texts = [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return [[text for text in rank if "REDUCE_GRAD" not in text] for rank in texts]
