"""Schedules as their users see them: found by name, and called once in each step."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload

from .frameworks import frameworks
from .plan import AnySchedule, Placement, Schedule, Verbs, find_schedule, register

if TYPE_CHECKING:
    from typing_extensions import Unpack


Report = TypeVar("Report")
Report_co = TypeVar("Report_co", covariant=True)


class LossFunction(Protocol[Report_co]):
    """Called with the output of the last stage."""

    def __call__(self, output: Any, /) -> tuple[Any, Report_co] | tuple[Any, Any, Report_co]: ...


class StepOptions(TypedDict, total=False):
    """The keywords of a call, for those who check types."""

    seq_length: int | None
    micro_batch_size: int | None
    decoder_seq_length: int | None
    forward_only: bool
    first_val_step: bool | None
    adjust_tensor_shapes_fn: Callable[..., Any] | None
    p2p_communicator: Any
    pg_collection: Any
    force_all_reduce: bool | None
    pipeline_inputs: Any


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
        """Returns a schedule that can be called: `schedule` itself, or a copy of it. A schedule that is loaded from a
        file of a plan has no `__call__`."""
        if isinstance(schedule, cls):
            return schedule
        return cls(**{field.name: getattr(schedule, field.name) for field in fields(schedule)})

    @overload
    def __call__(
        self,
        forward_step_func: Callable[..., tuple[Any, None]],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        **options: Unpack[StepOptions],
    ) -> list[Any]: ...
    @overload
    def __call__(
        self,
        forward_step_func: Callable[..., tuple[Any, LossFunction[Report] | None]],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        *,
        collect_non_loss_data: Literal[False] = False,
        **options: Unpack[StepOptions],
    ) -> list[Report]: ...
    @overload
    def __call__(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        *,
        collect_non_loss_data: bool,
        **options: Unpack[StepOptions],
    ) -> list[Any]: ...
    def __call__(
        self,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int | None = None,
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
        **others: Any,
    ) -> list[Any]:
        """Run forward and backward of `num_microbatches` microbatches. Every rank of the pipeline calls it alike.

        Args:
            forward_step_func: `forward_step_func(data_iterator, chunk)` runs one chunk on one microbatch and returns
                `(output, loss_func)`. The loss function is used on the last stage only: `loss_func(output)` returns
                `(loss, report)`, and the loss is divided by `num_microbatches`; or `(loss, num_tokens, report)`, and
                it is divided by `num_tokens` and by `num_microbatches`, or by neither with `calculate_per_token_loss`.
                Where sequences are cut, both are called for each slice, and losses and counts are added up.
            data_iterator: passed to `forward_step_func`; may be None where no data is read. A list holds one for each
                chunk. A single one is shared as by itertools.tee: every chunk sees all items, and all slices of a
                microbatch the same.
            model: the rank's chunk, or the list of its chunks, in the order of `stages_for_rank`. A chunk after the
                first stage has a method `set_input_tensor(input)`, as in Megatron. It is called before each forward,
                and again before a backward that recomputes. `input` is [tensor], or the list, tuple or dict that the
                previous stage returned; [None] on the first stage, if it has the method. A chunk's `config` has
                `PipelineConfig`'s fields. A chunk may be wrapped, as by DDP: its attributes are found through `module`.
            num_microbatches: any number from 1 on. May change from step to step.
            seq_length, micro_batch_size: the tensor between stages is [seq_length, micro_batch_size, hidden_size],
                as in Megatron. PipelineStages do not need them: their shapes are found. If they are not passed and the
                model does not compute its shapes, shapes are found in the first step with these arguments.
            decoder_seq_length: used in place of `seq_length` if a rank has one chunk, as by Megatron.
            forward_only: no gradients; nothing is kept for a backward. The loss may be a plain number, and `loss_func`
                None on the last stage: outputs are returned then.
            collect_non_loss_data: with `forward_only`, return what `loss_func(output, non_loss_data=True)` returns.
            first_val_step: with `forward_only`, whether to call the model's `set_is_first_microbatch`.
            adjust_tensor_shapes_fn: takes and returns the lists of shapes received and sent.
            p2p_communicator, pg_collection: have the pipeline's process group; without both it is `parallel_state`'s.
            force_all_reduce, pg_collection: passed on to `finalize_model_grads_func` if it takes them.
            pipeline_inputs: of one step of the whole pipeline, for models that compute their shapes from them. None
                stands for {"input_ids": [num_microbatches * micro_batch_size, seq_length]}.

        Returns:
            On the rank of the last stage the reports, in microbatch order; on other ranks an empty list, unless
            `config.broadcast_reports` is set. The reports of the slices of a microbatch become one: tensors and numbers
            are added up, of anything else the last is taken. Where outputs are returned, those of a microbatch are a
            list, one for each slice.

        Raises:
            ValueError, TypeError: arguments are wrong, or ranks disagree on them. Raised before anything is computed.
            PipelineError: when another rank failed, or a message did not come within `config.timeout` seconds.
        """
        arguments = {**locals()}
        del arguments["self"], arguments["others"]
        if others:
            raise _unknown(next(iter(others)))
        from .runtime import run_step  # with torch, which looking at schedules does without

        return run_step(self, **arguments)


def _unknown(name: str) -> TypeError:
    meant = difflib.get_close_matches(name, inspect.signature(ForwardBackward.__call__).parameters, 1)
    guess = f" (do you mean {meant[0]!r}?)" if meant else ""
    return TypeError(f"a schedule takes no argument {name!r}{guess}.")


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
    """Make a schedule of a function that calls verbs. It can be trained with, recorded, and found by its name.

    The keywords are the attributes of `megapipe.plan.Schedule`. With `slices=True` the function counts in units
    (`pipe.num_units`), so that sequences can be cut into slices.
    """

    def decorate(loops: Callable[[Verbs], Any]) -> ForwardBackward:
        settings = (placement, num_chunks, max_pp_size, forward_only, default_chunks, min_chunks, slices)
        decorated = ForwardBackward(name, loops, *settings)
        register(decorated)
        return decorated

    return decorate


def get_forward_backward_func(
    name: AnySchedule | int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: Any = None,
    *,
    pp_size: int | None = None,
) -> ForwardBackward:
    """The function that runs one step of a schedule: forward and backward of all microbatches.

    Args:
        name: the name of a schedule, or a plan to run: a `Plan`, or a path to a file of one (.json, .csv, .txt; see
            `megapipe.plan.find_schedule`). None: the environment variable MEGAPIPE_SCHEDULE; if that is not set, the
            schedule that Megatron would take: no_pipelining on one rank, else interleaved_1f1b with virtual stages and
            1f1b without. A number is taken for Megatron's first argument, `pp_size`.
        pp_size, vp_size: the pipeline ranks and virtual stages to choose the schedule by, as in Megatron. If both are
            None they come from `parallel_state`.
        schedule_pg_collection: the process groups, as in Megatron. They are only checked: pipelines of several models
            are refused.

    Raises:
        ValueError: there is no schedule of that name, a file holds no plan, or the groups are of several models.
        ScheduleError: the plan cannot run.
        TypeError: `pp_size` is given twice.
    """
    for framework in frameworks():
        framework.check_groups(schedule_pg_collection)
    if isinstance(name, int):
        if pp_size is not None:
            raise TypeError(f"pp_size is given twice, as {name} and as {pp_size}: give it once.")
        name, pp_size = None, name
    if name is None:
        name = os.environ.get("MEGAPIPE_SCHEDULE")
    if name is None:
        if pp_size is None and vp_size is None:
            from . import parallel_state  # with torch

            pp_size = parallel_state.get_pipeline_model_parallel_world_size()
            vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if (pp_size or 1) == 1:
            name = "no_pipelining"
        else:
            name = "1f1b" if vp_size is None else "interleaved_1f1b"
    return ForwardBackward.of(find_schedule(name))
