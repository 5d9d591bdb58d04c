"""The entry point: one call of a schedule, from the caller's arguments to the losses.

A step is prepared (its arguments checked, arguments.py), connected (its channels opened), built (a `Pipeline` over
them), and run: the schedule's loops drive the pipeline.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from .. import parallel_state
from ..config import PipelineConfig
from ..failures import Watchdog
from ..overlap import find_forward_segments
from ..p2p_communication import Communicator, Lookahead
from ..plan import (
    AnySchedule,
    Placement,
    Schedule,
    ScheduleError,
    StageInfo,
    Verbs,
    actions_of,
    find_schedule,
    gathered_chunks,
    register,
)
from ..sharding import ShardedChunks
from ..stages import Stage, StepArguments, StepEnd, hooks
from ..timing import StepRecord
from .arguments import (
    check_arguments,
    chunks_of,
    config_of,
    device_of,
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

__all__ = ["ForwardBackward", "schedule", "stages_for_rank"]


class ForwardBackward(Schedule):
    """A schedule as its users see it: a function that runs one training or validation step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        # For `help(get_forward_backward_func("1f1b"))`.
        del self.__wrapped__  # type: ignore[attr-defined]  # or signatures are those of the loops
        self.__doc__ = f"{inspect.getdoc(self.loops) or ''}\n\n{inspect.getdoc(type(self).__call__)}"

    @classmethod
    @functools.cache
    def of(cls, schedule: Schedule) -> ForwardBackward:
        """The schedule itself, or one like it that can be called: a plan that is read is a schedule without a call."""
        if isinstance(schedule, cls):
            return schedule
        return cls(**{field.name: getattr(schedule, field.name) for field in fields(schedule)})

    def __call__(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        *,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        p2p_communicator: Any = None,
        pg_collection: Any = None,
        force_all_reduce: bool | None = False,
        pipeline_inputs: Any = None,
    ) -> list[Any]:
        """Run forward and backward of `num_microbatches` microbatches. Every rank of the pipeline calls it alike.

        Args:
            forward_step_func: `forward_step_func(data_iterator, chunk)` runs one chunk on one microbatch and returns
                `(output, loss_func)`. The loss function is used on the last stage only: `loss_func(output)` returns
                `(loss, report)`, and the loss is divided by `num_microbatches`; or `(loss, num_tokens, report)`, and
                it is divided by `num_tokens` and by `num_microbatches`, or by neither with `calculate_per_token_loss`.
                Where `config.num_sequence_slices` cuts sequences, both are called for each slice (`megapipe.slices`
                tells which), and a slice's loss and tokens are its part of the microbatch's: they are added up.
            data_iterator: passed to `forward_step_func`. A list holds one per chunk; a single one is read by each
                chunk from the same place. It gives all slices of a microbatch the same items, those that the first of
                them reads, where it is an iterator. Read only where the model needs data: None will do elsewhere.
            model: the rank's chunk, or the list of them, in the order of `stages_for_rank`. A chunk behind the first
                stage has `set_input_tensor(input)`, which is called before each forward, and before a backward that may
                compute it again, with what the stage before returned: a list with the tensor in it, or the list, tuple
                or dict. Its `config` has the fields of `PipelineConfig`. Wrappers with a `module` are looked through.
            num_microbatches: any number from 1 on. May change from step to step.
            seq_length, micro_batch_size: the tensor between stages is [seq_length, micro_batch_size, hidden_size],
                as in Megatron. Where they are not passed, nor the model computes its shapes, shapes are found in the
                first step, and stay so in all steps that are given the same sizes.
            decoder_seq_length: takes the place of `seq_length` where a rank has one chunk. With several it is ignored,
                as by Megatron's interleaved schedule.
            forward_only: no gradients; nothing is kept for a backward. Nobody looks at the loss then, so it may be a
                plain number. On the last stage `loss_func` may be None, and the outputs are returned.
            collect_non_loss_data: call `loss_func(output, non_loss_data=True)` and return what it returns.
            first_val_step: with `forward_only`, whether to call the model's `set_is_first_microbatch`.
            adjust_tensor_shapes_fn: takes and returns the lists of shapes received and sent.
            p2p_communicator, pg_collection: where `pg_collection.pp` or `p2p_communicator.pp_group` is there, it is
                the pipeline's process group; otherwise that is `parallel_state`'s.
            force_all_reduce, pg_collection: passed on to `finalize_model_grads_func` where it takes them.
            pipeline_inputs: what one step of the whole pipeline is given, for models that compute their shapes from
                it. None stands for {"input_ids": [num_microbatches * micro_batch_size, seq_length]}.

        Returns:
            On the rank of the last stage the reports, in microbatch order; elsewhere an empty list, unless
            `config.broadcast_reports` is set. Megatron's trainers read them on the last rank, and find them there under
            V placement too. Of the slices of a microbatch, tensors and numbers in the reports are added up, and of
            anything else the last is taken; outputs returned in place of reports are a list of the slices' own.

        Raises:
            ValueError, TypeError: for wrong arguments, before anything is computed; on every rank where they disagree.
            PipelineError: when another rank failed, or a message did not come within `config.timeout` seconds.
        """
        with one_step(pipeline_group(pg_collection, p2p_communicator)) as session:
            models = chunks_of(model)
            step = StepArguments(
                forward_step_func=forward_step_func,
                data_iterators=iterator_per_chunk(data_iterator, len(models)),
                models=models,
                num_microbatches=num_microbatches,
                config=config_of(self, models, pg_collection),
                device=device_of(models),
                forward_only=forward_only or self.forward_only,
                collect_non_loss_data=collect_non_loss_data,
                first_val_step=first_val_step,
            )
            lengths = (seq_length, micro_batch_size, decoder_seq_length)
            shapes = ShapeArguments(*lengths, num_microbatches, pipeline_inputs, adjust_tensor_shapes_fn)
            keywords = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
            with collector.between_steps(step.config.gc_interval, models):
                prepared = prepare(self, step, shapes, session)
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
    """This rank's ways to the others in one step. `watchdog` and `communicator` are None for a pipeline of one rank."""

    watchdog: Watchdog | None
    communicator: Communicator | None
    boundaries: list[tuple[Below, Above]]
    """Per chunk, the one below its stage and the one above."""


def connect(prepared: PreparedStep, session: Session | None) -> Connection:
    """Agree with the other ranks on the step, and open its boundaries. Collective over the pipeline."""
    step, key = prepared.arguments, prepared.key
    config = step.config
    watchdog, communicator, lookahead = None, None, Lookahead(0)
    if session is not None:
        watchdog = session.watchdog
        agree(prepared, session, key.schedule.name)
        communicator = open_channels(prepared, session)
        communicator.begin_step(lambda: key.plan, step.forward_only)
        if config.overlap_p2p_comm:
            ahead = config.p2p_lookahead
            lookahead = communicator.lookahead if ahead is None else Lookahead(ahead)
    specs, undescribed = prepared.specs, prepared.undescribed
    ways = (communicator, lookahead, step.forward_only)
    boundaries = boundaries_around(key, prepared.pp_rank, specs, *ways, undescribed)
    return Connection(watchdog, communicator, boundaries)


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
    return make_pipeline(prepared.key, prepared.pp_rank, chunks, step, sync, monitor)


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
    end_first_steps(looks, step, prepared.key, prepared.undescribed, is_sharded=prepared.sharded is not None)
    if record is not None and step.config.record_timeline is not None:
        record.finish()
        step.config.record_timeline.keep(record)


def _gradient_sync(prepared: PreparedStep) -> GradientSync:
    step = prepared.arguments
    is_split = False
    if step.config.no_sync_func is not None and not step.forward_only:
        in_segments = any(find_forward_segments(module) is not None for module in step.models)
        is_split = in_segments or prepared.key.plan.splits_backward
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
        for around in hooks.around_finalizing:
            stack.enter_context(around(end))
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


def schedule(
    name: str,
    *,
    placement: Placement,
    num_chunks: int | None = 1,
    max_pp_size: int | None = None,
    forward_only: bool = False,
    default_chunks: int = 1,
    min_chunks: int = 1,
    slices: bool = False,
) -> Callable[[Callable[[Verbs], Any]], ForwardBackward]:
    """Make a function of the verbs a schedule that can be trained with, recorded, and found by its name.

    Args:
        placement: which rank holds which stage.
        num_chunks: stages per rank; None where the caller decides.
        max_pp_size: the largest pipeline it is meant for.
        forward_only: it has no backward.
        default_chunks: stages per rank where neither the schedule nor the caller says.
        min_chunks: the fewest of them on several ranks, where the caller decides.
        slices: it counts in slices of sequences (`pipe.num_units`), and so can cut them.
    """

    def decorate(loops: Callable[[Verbs], Any]) -> ForwardBackward:
        settings = (placement, num_chunks, max_pp_size, forward_only, default_chunks, min_chunks, slices)
        decorated = ForwardBackward(name, loops, *settings)
        register(decorated)
        return decorated

    return decorate


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
