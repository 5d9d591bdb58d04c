"""One call of a schedule, from the caller's arguments to the losses.

A step is prepared (its arguments checked, arguments.py), connected (its channels opened), built (a `Pipeline` over
them), and run: the schedule's loops drive the pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from .. import parallel_state
from ..config import PipelineConfig
from ..failures import Watchdog
from ..frameworks import StepEnd, frameworks
from ..p2p_communication import Communicator, Lookahead
from ..plan import Action, AnySchedule, Schedule, ScheduleError, StageInfo, actions_of, find_schedule, gathered_chunks
from ..sharding import ShardedChunks
from ..stages import Stage, StepArguments, has_segments
from ..timing import StepRecord
from .arguments import (
    check_arguments,
    chunks_of,
    config_of,
    device_of,
    is_forward_only,
    iterator_per_chunk,
    pipeline_group,
    remote_ends,
    specs_of,
    to_agree_on,
    undescribed_messages,
)
from .boundary import Above, Below, boundaries_around
from .cutting import sequence_slices
from .first_step import FirstStep, end_first_steps, first_steps, make_stages
from .found_shapes import FoundShapes, Specs, UndescribedMessages
from .garbage import collector
from .grad_sync import GradientSync, check_replicas, finalize_gradients
from .monitor import Monitor
from .pipeline import Chunk, Pipeline
from .plans import PlanKey
from .rollback import RollbackRequired, SpeculativePipeline, speculate
from .session import Session, one_step
from .shapes import ShapeArguments

__all__ = ["run_step", "stages_for_rank"]


def run_step(
    schedule: Schedule,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    shapes: ShapeArguments,
    *,
    forward_only: bool,
    collect_non_loss_data: bool,
    first_val_step: bool | None,
    p2p_communicator: Any,
    pg_collection: Any,
    force_all_reduce: bool | None,
) -> list[Any]:
    """The call of a schedule (`ForwardBackward.__call__` has its arguments), from its arguments to the reports."""
    with one_step(pipeline_group(pg_collection, p2p_communicator)) as session:
        models = chunks_of(model)
        step = StepArguments(
            forward_step_func=forward_step_func,
            data_iterators=iterator_per_chunk(data_iterator, len(models)),
            models=models,
            num_microbatches=shapes.num_microbatches,
            config=config_of(schedule, models, pg_collection),
            device=device_of(models),
            forward_only=is_forward_only(schedule, forward_only),
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        keywords = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
        with collector.between_steps(step.config.gc_interval, models):
            prepared = prepare(schedule, step, shapes, session)
            run(prepared, connect(prepared, session))
            with _around_finalizing(prepared, session, keywords):
                if not step.forward_only:
                    finalize_gradients(step.config, models, step.num_tokens, keywords)
    return step.results


@dataclass
class PreparedStep:
    """A step whose arguments have been checked on this rank.

    Attributes:
        key: of the plan that the schedule follows.
        specs: per stage the messages that it receives and sends, where known.
        undescribed: the messages that are known only since the first step, or not yet.
        sharded: the chunks that are sharded by torch's FSDP2, if any.
    """

    arguments: StepArguments
    key: PlanKey
    pp_rank: int
    stages: list[StageInfo]
    specs: Specs
    undescribed: UndescribedMessages
    sharded: ShardedChunks | None


def prepare(schedule: Schedule, step: StepArguments, shapes: ShapeArguments, session: Session | None) -> PreparedStep:
    """Check the arguments, and find out what this rank needs for the step."""
    config = step.config
    pp_rank, pp_size = (0, 1) if session is None else (session.pp_rank, len(session.ranks))
    stages = schedule.stages(pp_rank, pp_size, len(step.models))
    check_arguments(step, stages)
    if len(stages) > 1:
        shapes.decoder_seq_length = None
    step.slices = sequence_slices(schedule, step, shapes)
    key = PlanKey(schedule, pp_size, step.num_microbatches, len(stages), config.settings, config.num_sequence_slices)
    if (config.max_in_flight, config.recompute, config.offload_activations) != (None, None, None):
        key.plan  # noqa: B018  # refuses a limit that the schedule cannot keep to, stages that there are not, and slices
    if not step.forward_only:
        check_replicas(step.models, key)
    is_reduced = config.grad_sync_func is not None or config.finalize_model_grads_func is not None
    sharded = ShardedChunks.find(step.models, step.forward_only, is_reduced)
    if sharded is not None and config.max_gathered_chunks is not None and not step.forward_only:
        sharded.follow(gathered_chunks(key.plan, pp_rank, config.max_gathered_chunks))
    ends = [remote_ends(stage, schedule.placement, pp_rank, pp_size) for stage in stages]
    specs = specs_of(step, shapes, stages, ends)
    found = FoundShapes() if session is None else session.found_shapes
    undescribed = undescribed_messages(step, shapes, stages, ends, specs, found)
    undescribed.fill_in(specs)
    return PreparedStep(step, key, pp_rank, stages, specs, undescribed, sharded)


class Connection(NamedTuple):
    """This rank's ways to the others in one step. `session` and `communicator` are None for a pipeline of one rank."""

    session: Session | None
    communicator: Communicator | None
    boundaries: list[tuple[Below, Above]]
    """Per chunk, the one below its stage and the one above."""
    posted_ahead: Mapping[Action, Sequence[Action]]
    """See `Pipeline`."""

    @property
    def watchdog(self) -> Watchdog | None:
        return None if self.session is None else self.session.watchdog


def connect(prepared: PreparedStep, session: Session | None) -> Connection:
    """Agree with the other ranks on the step, and open its boundaries. Collective over the pipeline."""
    step, key = prepared.arguments, prepared.key
    config = step.config
    communicator, lookahead = None, Lookahead(0)
    if session is not None:
        agree(prepared, session, key.schedule.name)
        communicator = open_channels(prepared, session)
        communicator.begin_step(lambda: key.plan, step.forward_only)
        if config.overlap_p2p_comm:
            ahead = config.p2p_lookahead
            lookahead = communicator.lookahead if ahead is None else Lookahead(ahead)
    specs, undescribed = prepared.specs, prepared.undescribed
    ways = (communicator, lookahead, step.forward_only)
    boundaries = boundaries_around(key, prepared.pp_rank, specs, *ways, undescribed)
    return Connection(session, communicator, boundaries, _posted_ahead(prepared, communicator, lookahead))


def _posted_ahead(
    prepared: PreparedStep, communicator: Communicator | None, lookahead: Lookahead
) -> Mapping[Action, Sequence[Action]]:
    if communicator is None or not communicator.matches_by_order or not lookahead.messages:
        return {}
    specs = [spec for around in prepared.specs for side in around for spec in side or ()]
    if all(spec.nbytes <= communicator.buffered_bytes for spec in specs):
        return {}
    plan = prepared.key.plan
    is_of_plan = plan.forward_only == prepared.arguments.forward_only  # not a validation by the plan of a training step
    return plan.posted_ahead[prepared.pp_rank] if is_of_plan else {}


def agree(prepared: PreparedStep, session: Session, called: str) -> None:
    """Check that all ranks of the pipeline make the same call. Collective over the pipeline.

    Args:
        called: the schedule, and what is done with it.
    """
    step = prepared.arguments
    session.watchdog.timeout = step.config.timeout
    undescribed = prepared.undescribed.to_agree_on(prepared.specs)
    session.agree(to_agree_on(called, step, prepared.stages, prepared.specs) | undescribed)


def open_channels(prepared: PreparedStep, session: Session) -> Communicator:
    """Collective over the pipeline at the first step, or the warm-up, that needs these channels."""
    step, key = prepared.arguments, prepared.key
    has_headers = step.config.variable_seq_lengths or bool(prepared.undescribed)
    return session.communicator(key.schedule.placement, key.num_chunks, step.device, has_headers, step.config)


def build(
    prepared: PreparedStep,
    stages: Sequence[Stage],
    looks: Sequence[FirstStep | None],
    connection: Connection,
    sync: GradientSync,
    record: StepRecord | None,
    make_pipeline: Callable[..., Pipeline],
) -> Pipeline:
    """The object that the schedule's loops drive."""
    step = prepared.arguments
    monitor = Monitor(connection.watchdog, connection.communicator, record)
    chunks = [
        Chunk(stage, *around, actions_of(stage.info.index, step.num_microbatches, step.num_slices), look)
        for stage, around, look in zip(stages, connection.boundaries, looks)
    ]
    return make_pipeline(prepared.key, prepared.pp_rank, chunks, step, sync, monitor, connection.posted_ahead)


def run(prepared: PreparedStep, connection: Connection) -> None:
    """Run the loops, again after a rollback of the last optimizer step. The results are in the arguments."""
    step, schedule = prepared.arguments, prepared.key.schedule
    loops = schedule.loops if step.forward_only else prepared.key.loops
    sync = _gradient_sync(prepared)
    speculation = speculate(step, prepared.key, prepared.pp_rank, connection.watchdog)
    make_pipeline = Pipeline if speculation is None else functools.partial(SpeculativePipeline, speculation)
    while True:
        record = _begin_record(prepared)
        stages = make_stages(step, prepared.stages, prepared.specs, prepared.undescribed)
        looks = first_steps(stages, step, prepared.undescribed)
        pipe = build(prepared, stages, looks, connection, sync, record, make_pipeline)
        try:
            with _timed(step.config), sync, nullcontext() if record is None else record.storages:
                reports = loops(pipe)
            break
        except RollbackRequired:
            assert speculation is not None
            assert isinstance(pipe, SpeculativePipeline)
            assert connection.communicator is not None
            speculation.begin_again(pipe, connection.communicator, prepared.sharded)
    if reports is not step.results:
        raise ScheduleError(f"{schedule.name} did not end with `return pipe.finish()`.")
    is_sharded = prepared.sharded is not None
    end_first_steps(looks, step, prepared.key, prepared.undescribed, is_sharded, connection.session)
    if record is not None and step.config.record_timeline is not None:
        record.finish()
        step.config.record_timeline.keep(record)


def _gradient_sync(prepared: PreparedStep) -> GradientSync:
    step = prepared.arguments
    is_split = False
    if step.config.no_sync_func is not None and not step.forward_only:
        is_split = any(map(has_segments, step.models)) or prepared.key.plan.splits_backward
    sizes = (step.num_units, is_split)
    return GradientSync(step.config, step.models, *sizes, prepared.sharded, step.forward_only)


def _begin_record(prepared: PreparedStep) -> StepRecord | None:
    """The record of this step's times; None for none."""
    step, schedule = prepared.arguments, prepared.key.schedule
    if step.config.record_timeline is None or (step.forward_only and not schedule.forward_only):
        return None
    record: StepRecord = step.config.record_timeline.begin(schedule.name, step.device)
    return record


@contextmanager
def _around_finalizing(prepared: PreparedStep, session: Session | None, keywords: dict[str, Any]) -> Iterator[None]:
    """What frameworks around the core do at the end of a step."""
    with ExitStack() as stack:
        step, pp_size = prepared.arguments, prepared.key.pp_size
        last_stage = prepared.key.schedule.placement.rank(pp_size * len(step.models) - 1, pp_size)
        share: Callable[..., Any] = _alone
        if session is not None:
            share = functools.partial(session.share, source=last_stage, device=step.device)
        end = StepEnd(step, prepared.pp_rank, pp_size, last_stage, keywords, share)
        for framework in frameworks():
            stack.enter_context(framework.around_finalizing(end))
        yield
        if step.config.broadcast_reports:
            step.results[:] = share(step.results, what="reports")


def _alone(value: Any, what: str = "") -> Any:
    """`Session.share` on a pipeline of one rank."""
    return value


@contextmanager
def _timed(config: PipelineConfig) -> Iterator[None]:
    if config.timers is None:
        yield
        return
    timer = config.timers("forward-backward", log_level=1)
    timer.start(barrier=config.barrier_with_L1_time)
    try:
        yield
    finally:
        timer.stop()


def stages_for_rank(
    schedule: AnySchedule,
    pp_rank: int | None = None,
    pp_size: int | None = None,
    num_chunks: int | None = None,
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
