"""Classes of torch's schedules, and schedules that they have made, become such that megapipe runs."""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed.pipelining.schedules as theirs

from ...config import PipelineConfig
from ...plan import ELSEWHERE, AnySchedule, find_schedule, schedule_names
from .orders import order_of, plan_of
from .schedule import Adopted

OURS = {name: ours for name, ours in ELSEWHERE.items() if hasattr(theirs, name)} | {"_ScheduleForwardOnly": "inference"}
"""The schedules that run in the place of torch's."""


def adopt(schedule: Any, convert: bool = True, config: PipelineConfig | None = None) -> Any:
    """Let megapipe run the microbatches of a schedule that torch's class has made. Every rank calls it alike.

    Args:
        schedule: it stays the same object, with its stages, and an instance of its class.
        convert: where the schedule splits backwards, let linear layers and embeddings leave their weight gradients to
            W, as `megapipe.weight_grad.convert` does. Subclasses that have the forward of nn.Linear or nn.Embedding
            are converted too.
        config: settings of the pipeline. The same on every rank.

    Returns:
        `schedule`.

    Raises:
        TypeError: it is no schedule of torch.distributed.pipelining, or `config` no PipelineConfig.
        ValueError: `config` cuts sequences. A step raises it for an order that cannot run.
        NotImplementedError: it, or a stage of this rank, has functions of its own that megapipe would not call.
    """
    if not isinstance(schedule, theirs._PipelineSchedule):
        raise TypeError(f"adopt takes a schedule of torch.distributed.pipelining, got a {type(schedule).__name__}.")
    if not isinstance(config, PipelineConfig | None):
        raise TypeError(f"config must be a megapipe.PipelineConfig or None, got a {type(config).__name__}.")
    if config is not None and config.num_sequence_slices != 1:
        raise ValueError("a schedule of torch's calls modules with whole sequences: leave num_sequence_slices at 1.")
    made: Any = schedule
    if not isinstance(schedule, Adopted):
        runs = next(base for base in type(schedule).__mro__ if "_step_microbatches" in vars(base))
        is_known = runs.__name__ in OURS or issubclass(runs, theirs.PipelineScheduleMulti)
        if runs.__module__ != theirs.__name__ or not is_known:
            raise NotImplementedError(
                f"{type(schedule).__name__} runs microbatches by its own _step_microbatches, which megapipe would not "
                "call: derive it from PipelineScheduleMulti, and write its order into pipeline_order."
            )
        named = _name_of(schedule)
        made.__class__ = _adopted(type(schedule))
        made._named = named
    made._convert, made._config, made._chunks = convert, config, ()
    made._check()
    return schedule


def get_schedule_class(name: AnySchedule) -> Any:
    """The class of a schedule that megapipe runs. It is made as torch's are, of one stage or of a list of them.

    Args:
        name: as torch.distributed.pipelining has it ("Interleaved1F1B"), or as `get_forward_backward_func` does:
            "v_half" (which "V-Half" is too), a plan, or the path to a file of one.

    Raises:
        ValueError: there is no such schedule.
    """
    if isinstance(name, str):
        if name in ("PipelineScheduleSingle", "PipelineScheduleMulti"):
            return _adopted(getattr(theirs, name))
        names = {_letters(ours): ours for ours in schedule_names()}
        names |= {_letters(other.removeprefix("Schedule")): ours for other, ours in OURS.items()}
        name = names.get(_letters(name.removeprefix("Schedule")), name)
    schedule = find_schedule(name)
    for other, ours in OURS.items():
        if schedule.name == ours:
            return _adopted(getattr(theirs, other))
    base = theirs.PipelineScheduleSingle if schedule.num_chunks == 1 else theirs.PipelineScheduleMulti
    return type(schedule.name, (Adopted, base), {"_named": schedule, "__doc__": schedule.__doc__})


@functools.cache
def _adopted(cls: type) -> Any:
    """A class of torch's, or one derived from it, that megapipe runs."""
    return type(cls.__name__, (Adopted, cls), {"_named": OURS.get(cls.__name__), "__doc__": cls.__doc__})


def _name_of(schedule: Any) -> str | None:
    """Our schedule for one of torch's; None where its order is another one than its class makes."""
    known: Any = next((base for base in type(schedule).__mro__ if base.__name__ in OURS), None)
    if known is None:
        return None
    if hasattr(known, "_calculate_single_rank_operations"):
        order = order_of(schedule)
        usual = {rank: known._calculate_single_rank_operations(schedule, rank) for rank in order}
        if plan_of(order, known.__name__).cells() != plan_of(usual, known.__name__).cells():
            return None
    return OURS[known.__name__]


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


ScheduleGPipe = _adopted(theirs.ScheduleGPipe)
Schedule1F1B = _adopted(theirs.Schedule1F1B)
ScheduleInterleaved1F1B = _adopted(theirs.ScheduleInterleaved1F1B)
ScheduleLoopedBFS = _adopted(theirs.ScheduleLoopedBFS)
ScheduleInterleavedZeroBubble = _adopted(theirs.ScheduleInterleavedZeroBubble)
ScheduleZBVZeroBubble = _adopted(theirs.ScheduleZBVZeroBubble)
ScheduleDualPipeV = _adopted(theirs.ScheduleDualPipeV)
