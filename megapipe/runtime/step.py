"""One call of a schedule, from the caller's arguments to the losses.

A `Runner` is kept for each distinct way of calling: the same schedule, config values, models, sizes (`CallKey`). Making
one checks the arguments; its first run compares them with those of the other ranks. It runs the schedule's loops, which
call a `Pipeline`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from .. import parallel_state
from ..chunks import device_of
from ..frameworks import AgreedStep, frameworks
from ..plan import AnySchedule, Schedule, StageInfo, find_schedule
from ..stages import Call, Extension
from ..structure import structure_of
from .arguments import check_call, chunks_of, config_of, is_forward_only, iterator_per_chunk, pipeline_group
from .garbage import collection_held_back
from .grad_sync import finalize_gradients
from .runner import Runner, call_key
from .session import Alone, Session, one_step

MOST_RUNNERS = 8
"""The number of runners that a session keeps."""


def run_step(
    schedule: Schedule,
    model: Any,
    data_iterator: Any,
    forward_only: bool,
    pg_collection: Any,
    p2p_communicator: Any,
    force_all_reduce: bool | None,
    **arguments: Any,
) -> list[Any]:
    """Run one step. Takes the arguments of `ForwardBackward.__call__`, and returns the reports of the loss function."""
    in_use = frameworks()
    with one_step(pipeline_group(in_use, pg_collection, p2p_communicator)) as session:
        models = chunks_of(model)
        if len(models) > 1:  # as Megatron's interleaved schedule
            arguments["decoder_seq_length"] = None
        device = device_of(models)
        call = Call(
            models=models,
            data_iterators=iterator_per_chunk(data_iterator, len(models)),
            config=config_of(in_use, schedule, models, pg_collection),
            device=device,
            num_tokens=torch.zeros((), dtype=torch.float64, device=device),
            structures=[*map(structure_of, models)],
            forward_only=is_forward_only(schedule, forward_only),
            schedule=schedule,
            frameworks=in_use,
            **arguments,
        )
        check_call(call, len(session.ranks))
        keywords = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        with collection_held_back:
            runner = find_runner(schedule, call, session)
            try:
                extensions = runner.prepare(call)
                if in_use or call.config.broadcast_reports:
                    _run_among(call, runner, extensions, session, keywords)
                else:
                    runner.run(call, extensions)
                    are_counted = call.config.calculate_per_token_loss
                    if not (call.forward_only or call.is_void) and (
                        are_counted or call.config.finalize_model_grads_func is not None
                    ):
                        finalize_gradients(call.config, models, call.num_tokens, keywords)
            except BaseException:
                session.runners.clear()  # they may hold messages that are in flight
                raise
    if call.is_void:
        ways = (pg_collection, p2p_communicator, force_all_reduce)
        return run_step(schedule, model, call.data_iterators, forward_only, *ways, **arguments)
    return call.results


def find_runner(schedule: Schedule, call: Call, session: Session | Alone) -> Runner:
    """Returns the runner of an earlier step with the same `CallKey`, or a new one.

    Raises:
        ValueError, TypeError: a new runner refuses the arguments.
    """
    key = call_key(schedule, call)
    runners: list[Runner] = session.runners
    for number, runner in enumerate(runners):
        if runner.call_key == key and runner.fits(call):
            runners.append(runners.pop(number))
            return runner
    runner = Runner(key, call, session)
    runners.append(runner)
    del runners[:-MOST_RUNNERS]
    return runner


def _run_among(
    call: Call, runner: Runner, extensions: Sequence[Extension], session: Session | Alone, keywords: dict[str, Any]
) -> None:
    """Run a step in the contexts that frameworks put around its loops and its end. Broadcasts the reports if asked."""
    pp_size = len(session.ranks)
    last_stage = runner.plan_key.schedule.placement.rank(pp_size * len(call.models) - 1, pp_size)
    share: Callable[..., Any] = functools.partial(session.share, source=last_stage, device=call.device)
    step = AgreedStep(call, session.pp_rank, pp_size, last_stage, keywords, share)
    with ExitStack() as stack:
        for framework in call.frameworks:
            stack.enter_context(framework.around_loops(step))
        runner.run(call, extensions)
    if call.is_void:
        return
    with ExitStack() as stack:
        for framework in call.frameworks:
            stack.enter_context(framework.around_finalizing(step))
        if not call.forward_only:
            finalize_gradients(call.config, call.models, call.num_tokens, keywords)
        if call.config.broadcast_reports:
            call.results[:] = share(call.results, what="reports")


def stages_for_rank(
    schedule: AnySchedule, pp_rank: int | None = None, pp_size: int | None = None, num_chunks: int | None = None
) -> list[StageInfo]:
    """The stages that a rank holds under `schedule`, one per chunk, in the order of the `model` argument.

    Args:
        schedule: as `get_forward_backward_func` takes it: a name, a plan, or a path to a file of one.
        pp_rank, pp_size: None takes them from `parallel_state`.
        num_chunks: stages per rank; None takes the schedule's own number, or for schedules that leave it open the
            virtual pipeline size of `parallel_state`, or the schedule's default.

    Raises:
        ValueError: for an unknown schedule, a rank that there is not, and chunks that the schedule cannot have.
    """
    found = find_schedule(schedule)
    if pp_size is None:
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        if num_chunks is None and found.num_chunks is None:
            num_chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    if pp_rank is None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
    if not 0 <= pp_rank < pp_size:
        raise ValueError(f"there is no rank {pp_rank} in a pipeline of {pp_size}.")
    return found.stages(pp_rank, pp_size, num_chunks)
