"""Schedules of torch.distributed.pipelining: those of its classes, and plans that its runtime runs."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..plan import KINDS, Plan, StageInfo

if TYPE_CHECKING:
    from .question import Question

TORCHS_KINDS = ("F", "B", "W", "BW")
OLD = (
    "stages of torch 2.9 end the process over gloo (one greets the next with 8 bytes, which expects 4): take torch 2.10"
)
RUNS_OVER_GLOO = torch.__version__ >= "2.10"


def is_torchs(schedule: Any) -> bool:
    """Whether it is an object of one of torch's classes for schedules."""
    theirs = sys.modules.get("torch.distributed.pipelining.schedules")
    return theirs is not None and isinstance(schedule, theirs._PipelineSchedule)


def step_of_torchs(
    schedule: Any, question: Question
) -> tuple[Callable[[Sequence[Any]], Any], list[nn.Module], list[StageInfo]]:
    """What runs a step of one of torch's schedules, and the modules and places of its stages."""
    if not RUNS_OVER_GLOO and dist.get_backend() == "gloo":
        raise ValueError(f"{OLD}.")
    stages = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    infos = [StageInfo(stage.stage_index, stage.num_stages) for stage in stages]

    def step(microbatches: Sequence[Any]) -> Any:
        *inputs, targets = (torch.cat(parts) for parts in zip(*microbatches))
        losses: list[Any] = []
        is_last = any(info.is_last for info in infos)
        batch = inputs if any(info.is_first for info in infos) else ()
        schedule.step(*batch, **({"target": targets, "losses": losses} if is_last else {}))
        return [loss.detach() for loss in losses]

    if schedule._n_microbatches != len(question.data):
        raise ValueError(
            f"the schedule was made for {schedule._n_microbatches} microbatches, and data has {len(question.data)}."
        )
    return step, [stage.submod for stage in stages], infos


def why_not(plan: Plan) -> str:
    """Why torch's runtime cannot run a plan; "" where it can."""
    kinds = {action.kind for row in plan.actions for action in row}
    if plan.num_slices > 1:
        return "it has no slices of sequences"
    if plan.forward_only:
        return "its runtime trains"
    if unknown := [KINDS[kind].label for kind in KINDS if kind in kinds and kind not in TORCHS_KINDS]:
        return f"it has no action for: {', '.join(unknown)}"
    if plan.pp_size == 1:
        return "it has pipelines of two ranks and more only"
    return "" if RUNS_OVER_GLOO else OLD


def runtime_of_plan(plan: Plan, make_stage: Callable[[StageInfo], nn.Module], loss: Callable[..., Any]) -> Any:
    """A schedule of torch's that runs a plan, by its CSV, on this rank."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    rank, num_stages = dist.get_rank(), plan.pp_size * plan.num_chunks
    stages = []
    for info in plan.placement.stages(rank, plan.pp_size, plan.num_chunks):
        stage = PipelineStage(make_stage(info), info.index, num_stages, torch.device("cpu"))
        stage.stage_index_to_group_rank = {index: plan.rank_of(index) for index in range(num_stages)}
        stages.append(stage)
    schedule = _PipelineScheduleRuntime(stages, plan.num_microbatches, loss_fn=loss)  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "plan.csv")
        plan.save_csv(path)
        schedule._load_csv(str(path))
    return schedule
