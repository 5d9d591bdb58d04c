"""The door: one call of a schedule, from the caller's arguments to the losses.

It checks what it was given (arguments.py), connects the stages, and runs the schedule's loops on a `Pipeline`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from .. import parallel_state
from ..config import PipelineConfig
from ..overlap import find_forward_parts
from ..p2p_communication import Communicator, Lookahead
from ..plan import (
    Placement,
    Plan,
    Schedule,
    ScheduleError,
    Settings,
    StageInfo,
    Verbs,
    find_schedule,
    make_plan,
    register,
)
from ..sharding import ShardedChunks
from . import hooks
from .arguments import (
    Specs,
    StepArguments,
    check_arguments,
    config_of,
    device_of,
    iterator_per_chunk,
    pipeline_group,
    specs_of,
    to_agree_on,
)
from .boundary import boundaries_around
from .grad_sync import GradientSync, finalize_gradients
from .hooks import StepEnd
from .pipeline import Chunk, Pipeline
from .retry import leave_batch, start_together
from .rollback import WeightsTakenBack, speculate
from .session import Session
from .shapes import ShapeArguments
from .stage import Stage
from .step_record import StepRecord, clock_of
from .weight_tuning import WeightTuner

__all__ = ["ForwardBackward", "schedule", "stages_for_rank"]


class ForwardBackward(Schedule):
    """A schedule as its users see it: a function that runs one training or validation step."""

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
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
            data_iterator: passed to `forward_step_func`. A list holds one per chunk; a single one is read by each
                chunk from the same place. Read only where the model needs data: None will do elsewhere.
            model: the rank's chunk, or the list of them, in the order of `stages_for_rank`. A chunk behind the first
                stage has `set_input_tensor(input)`, which is called before each forward, and before a backward that may
                compute it again, with what the stage before returned: a list with the tensor in it, or the list, tuple
                or dict. Its `config` has the fields of `PipelineConfig`. Wrappers with a `module` are looked through.
            num_microbatches: any number from 1 on. May change from step to step.
            seq_length, micro_batch_size: the tensor between stages is [seq_length, micro_batch_size, hidden_size],
                as in Megatron. Not needed where the model computes its shapes or `variable_seq_lengths` is set.
            decoder_seq_length: takes the place of `seq_length`.
            forward_only: no gradients; nothing is kept for a backward. On the last stage `loss_func` may then be
                None, and the outputs are returned.
            collect_non_loss_data: call `loss_func(output, non_loss_data=True)` and return what it returns.
            first_val_step: with `forward_only`, whether to call the model's `set_is_first_microbatch`.
            adjust_tensor_shapes_fn: takes and returns the lists of shapes received and sent.
            p2p_communicator, pg_collection: where `pg_collection.pp` or `p2p_communicator.pp_group` is there, it is
                the pipeline's process group; otherwise that is `parallel_state`'s.
            force_all_reduce, pg_collection: passed on to `finalize_model_grads_func` where it takes them.
            pipeline_inputs: what one step of the whole pipeline is given, for models that compute their shapes from
                it. None stands for {"input_ids": [num_microbatches * micro_batch_size, seq_length]}.

        Returns:
            On the rank of the last stage the reports, in microbatch order; elsewhere an empty list. Megatron's
            trainers read them on the last rank, and find them there under V placement too.

        Raises:
            ValueError, TypeError: for wrong arguments, before anything is computed; on every rank where they disagree.
            PipelineError: when another rank failed, or a message did not come within `config.timeout` seconds.
        """
        group = pipeline_group(pg_collection, p2p_communicator)
        session = None if group is None or group.size() == 1 else Session.of(group)
        with session.step() if session is not None else nullcontext():
            models = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else [model]
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
            try:
                reports = self._run(step, shapes, session)
            except BaseException:
                leave_batch(step.data_iterators)
                raise
            with self._around_finalizing(step, session, keywords):
                if not step.forward_only:
                    finalize_gradients(step.config, models, step.num_tokens, keywords)
        return reports

    def _run(self, step: StepArguments, shapes: ShapeArguments, session: Session | None) -> list[Any]:
        """Check the arguments, connect the stages, and run the loops."""
        config = step.config
        pp_rank, pp_size = (0, 1) if session is None else (session.pp_rank, len(session.ranks))
        stages = self.stages(pp_rank, pp_size, len(step.models))
        check_arguments(step, stages)
        if config.max_in_flight is not None:
            _plan(self, pp_size, step.num_microbatches, len(stages), config.settings)  # refuses what it cannot keep to
        is_reduced = config.grad_sync_func is not None or config.finalize_model_grads_func is not None
        sharded = ShardedChunks.find(step.models, step.forward_only, is_reduced)
        specs = specs_of(step, shapes, stages, self.placement, pp_rank, pp_size)
        tuner = self._begin_tuning(step, session)
        settings = config.settings if tuner is None else tuner.settings
        communicator = None if session is None else self._connect(step, session, stages, specs, tuner)
        plan = functools.partial(_plan, self, pp_size, step.num_microbatches, len(stages), settings)
        if communicator is not None:
            communicator.begin_step(plan, step.forward_only)
        around = boundaries_around(
            stages,
            self.placement,
            pp_rank,
            specs,
            communicator,
            step.num_microbatches,
            _lookahead(config, communicator),
            step.forward_only,
        )
        gradient_sync = self._gradient_sync(step, pp_size, sharded)
        speculation = speculate(step, plan, pp_rank, None if session is None else session.watchdog)
        while True:
            record = self._begin_record(step, tuner)
            pipe = Pipeline(
                [
                    Chunk(Stage(info, chunk, step, spec[1]), *boundaries)
                    for chunk, (info, spec, boundaries) in enumerate(zip(stages, specs, around))
                ],
                self.placement,
                pp_rank,
                pp_size,
                step.num_microbatches,
                step.results,
                communicator=communicator,
                watchdog=None if session is None else session.watchdog,
                gradient_sync=gradient_sync,
                sharded=sharded,
                partial_checkpoints=self._partial_checkpoints(config, step, pp_rank, pp_size, settings),
                settings=settings,
                weight_counts=None if tuner is None else tuner.counts,
                record=record,
                speculation=speculation,
            )
            try:
                with _timed(config), sharded or nullcontext(), gradient_sync or torch.no_grad():
                    reports: list[Any] = self.loops(pipe)
                break
            except WeightsTakenBack:
                assert speculation is not None
                pipe.discard_forwards(speculation.num_sent)
                speculation.begin_again()
        if reports is not step.results:
            raise ScheduleError(f"{self.name} did not end with `return pipe.finish()`.")
        if record is not None:
            _end_record(record, config, tuner)
        return step.results

    def _connect(
        self, step: StepArguments, session: Session, stages: list[StageInfo], specs: Specs, tuner: WeightTuner | None
    ) -> Communicator:
        """The channels of this step, once all ranks agree what it is."""
        session.watchdog.timeout = step.config.timeout
        session.watchdog.agree(to_agree_on(self, step, stages, specs) | {"the places of the Ws": str(tuner)})
        start_together(step, session)
        config = step.config
        return session.communicator(
            self.placement, len(stages), step.device, config.variable_seq_lengths, config.p2p_transport
        )

    def _gradient_sync(self, step: StepArguments, pp_size: int, sharded: ShardedChunks | None) -> GradientSync | None:
        """None where nothing is trained."""
        if step.forward_only:
            return None
        is_split = False
        if step.config.no_sync_func is not None:
            sizes = (pp_size, step.num_microbatches, len(step.models), step.config.settings)
            in_parts = any(find_forward_parts(module) is not None for module in step.models)
            is_split = in_parts or _splits_backward(self, *sizes)
        return GradientSync(step.config, step.models, step.num_microbatches, is_split, sharded)

    @contextmanager
    def _around_finalizing(
        self, step: StepArguments, session: Session | None, keywords: dict[str, Any]
    ) -> Iterator[None]:
        """What frameworks around the core do at the end of a pipeline's step."""
        with ExitStack() as stack:
            if session is not None:
                last_stage = self.placement.rank(len(session.ranks) * len(step.models) - 1, len(session.ranks))
                share = functools.partial(session.share, source=last_stage, device=step.device)
                end = StepEnd(step, session.pp_rank, len(session.ranks), last_stage, keywords, share)
                for around in hooks.around_finalizing:
                    stack.enter_context(around(end))
            yield

    def _begin_record(self, step: StepArguments, tuner: WeightTuner | None) -> StepRecord | None:
        recorder = step.config.record_timeline
        if step.forward_only and not self.forward_only:
            return None
        if recorder is not None:
            record: StepRecord = recorder.begin(self.name, step.device)
            return record
        return None if tuner is None else StepRecord(self.name, 0, clock_of(step.device))

    def _begin_tuning(self, step: StepArguments, session: Session | None) -> WeightTuner | None:
        if step.config.weight_grad_placement == "static" or session is None or step.forward_only:
            return None
        sizes = (step.num_microbatches, len(step.models), step.config.settings)
        if not _splits_backward(self, len(session.ranks), *sizes):
            return None
        if step.config.max_in_flight is not None and (num_peers := _num_peers(step.config)) > 1:
            # Ws may be anywhere, but in forwards and backwards these pipelines exchange data with each other.
            raise ValueError(
                f"with max_in_flight, weight_grad_placement='tuned' may start each of the {num_peers} pipelines that "
                "share tensors, sequences or experts in an order of its own: leave one of the two unset."
            )
        tuner = session.tuner(self, *sizes)
        tuner.begin_step()
        return tuner

    def _partial_checkpoints(
        self, config: PipelineConfig, step: StepArguments, pp_rank: int, pp_size: int, settings: Settings
    ) -> tuple[int, int] | None:
        """How many forwards checkpoint in part, of how many that this schedule has in flight on this rank."""
        num_partial = config.num_microbatches_with_partial_activation_checkpoints
        if num_partial is None or pp_size == 1:  # as in Megatron: without a pipeline there is no window
            return None
        plan = _plan(self, pp_size, step.num_microbatches, len(step.models), settings)
        return num_partial, plan.peak_in_flight(pp_rank)


def _end_record(record: StepRecord, config: PipelineConfig, tuner: WeightTuner | None) -> None:
    record.finish()
    if config.record_timeline is not None:
        config.record_timeline.keep(record)
    if tuner is not None:
        tuner.end_step(record)


@functools.lru_cache(maxsize=16)
def _plan(schedule: Schedule, pp_size: int, num_microbatches: int, num_chunks: int, settings: Settings) -> Plan:
    return make_plan(schedule, pp_size, num_microbatches, num_chunks, settings=settings)


@functools.lru_cache(maxsize=16)
def _splits_backward(
    schedule: Schedule, pp_size: int, num_microbatches: int, num_chunks: int, settings: Settings
) -> bool:
    plan = _plan(schedule, pp_size, num_microbatches, num_chunks, settings)
    return any(action.kind == "W" for action in plan.actions[0])


def schedule(
    name: str,
    *,
    placement: Placement,
    num_chunks: int | None = 1,
    max_pp_size: int | None = None,
    forward_only: bool = False,
    default_chunks: int = 1,
) -> Callable[[Callable[[Verbs], Any]], ForwardBackward]:
    """Make a function of the verbs a schedule that can be trained with, recorded, and found by its name.

    Args:
        placement: which rank holds which stage.
        num_chunks: stages per rank; None where the caller decides.
        max_pp_size: the largest pipeline it is meant for.
        forward_only: it has no backward.
        default_chunks: stages per rank where neither the schedule nor the caller says.
    """

    def decorate(loops: Callable[[Verbs], Any]) -> ForwardBackward:
        decorated = ForwardBackward(name, loops, placement, num_chunks, max_pp_size, forward_only, default_chunks)
        register(decorated)
        return decorated

    return decorate


def stages_for_rank(
    schedule: str | Schedule, pp_rank: int | None = None, pp_size: int | None = None, num_chunks: int | None = None
) -> list[StageInfo]:
    """The stages that a rank holds under `schedule`, one per chunk, in the order of the `model` argument.

    Args:
        pp_rank, pp_size: None takes them from `parallel_state`.
        num_chunks: stages per rank; None takes the schedule's own number, or for schedules that leave it open the
            virtual pipeline size of `parallel_state`, or the schedule's default.
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


def _num_peers(config: PipelineConfig) -> int:
    """How many pipelines communicate with each other within a forward or backward."""
    num_experts = config.expert_model_parallel_size
    if parallel_state.model_parallel_is_initialized():
        num_experts = max(num_experts, parallel_state.get_expert_model_parallel_world_size())
    return num_experts * config.tensor_model_parallel_size * config.context_parallel_size


def _lookahead(config: PipelineConfig, communicator: Communicator | None) -> Lookahead:
    if communicator is None or not config.overlap_p2p_comm:
        return Lookahead(0)
    return communicator.lookahead if config.p2p_lookahead is None else Lookahead(config.p2p_lookahead)


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
