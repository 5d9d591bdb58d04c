"""The settings of a pipeline: the fields of Megatron's ModelParallelConfig that matter here, and a few of ours.

The config is `model.config`, which may be any object with some of these fields (Megatron's own config, a dataclass
of yours, a namespace); those it lacks take the defaults below.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeGuard, runtime_checkable

import torch

from .plan import Settings, nearest

__all__ = [
    "DEFAULTS",
    "EXTENSIONS",
    "PER_CHUNK",
    "PipelineConfig",
    "TimelineRecorder",
    "ValidatedLater",
    "check_whole_number",
]

PER_CHUNK = ("no_sync_func", "grad_sync_func", "param_sync_func")
"""Settings that may be lists, with one function per chunk."""

_OF_THE_CALL = "an argument of the schedule's call"
_OF_THE_GROUPS = "an argument of parallel_state.initialize_model_parallel"

NO_FIELDS = {
    **dict.fromkeys(("num_microbatches", "seq_length", "micro_batch_size", "decoder_seq_length"), _OF_THE_CALL),
    **dict.fromkeys(("forward_only", "forward_step_func", "data_iterator"), _OF_THE_CALL),
    "pipeline_model_parallel_size": _OF_THE_GROUPS,
    "virtual_pipeline_model_parallel_size": _OF_THE_GROUPS,
    "schedule": "the argument of get_forward_backward_func",
}
"""What users say at another place, and where."""

ELSEWHERE = {
    "n_microbatches": "num_microbatches",
    "params_dtype": "pipeline_dtype",
    "dtype": "pipeline_dtype",
    "recompute_granularity": "recompute",
    "recompute_num_layers": "recompute",
    "activation_checkpointing": "recompute",
    "manual_gc_interval": "gc_interval",
}
"""Names that Megatron, torch and others have for the same."""

LONGEST = 1e9  # seconds: transports count nanoseconds in 64 bits


@runtime_checkable
class ValidatedLater(Protocol):
    """A step's side of a megapipe.PostValidatedOptimizer."""

    @property
    def has_pending_step(self) -> bool:
        """Whether the next step of the pipeline may have to begin again."""

    def validate(self, check: Callable[[], None]) -> bool:
        """Wait until it is known whether the last optimizer step stands. Returns whether it was rolled back.

        Args:
            check: called while waiting; raises where another rank has failed.
        """

    def finalize_everywhere(self) -> None:
        """Make the weights final, where every rank does so at the same point."""


@runtime_checkable
class TimelineRecorder(Protocol):
    """A step's side of a megapipe.TimelineRecorder."""

    def begin(self, name: str, device: torch.device) -> Any:
        """A record for the step of the schedule `name` that is about to begin."""

    def keep(self, record: Any) -> None:
        """Keep the record of a step that has succeeded."""


@dataclass
class PipelineConfig:
    """How a pipeline communicates, schedules and trains. The same on every rank.

    The default of a field is None where nothing else is said.

    Attributes:
        hidden_size: Last dimension of the tensor between stages, where the model does not compute its shapes itself.
        pipeline_dtype: The dtype of the tensor between stages. None: that of the model's first floating-point
            parameter.
        variable_seq_lengths: Microbatches differ in shape: a header with its shapes precedes each message. Default:
            False.
        overlap_p2p_comm: Post receives before they are asked for. With False each one is posted when its turn comes.
            Default: True.
        p2p_lookahead: Receives that each channel keeps posted ahead, on CPU and with p2p_transport="host". None: 2,
            and while a rank waits more of them, up to 1 MiB on each channel. Over NCCL, where a receive that waits
            occupies the device, it is one for messages above 0.5 MiB times `p2p_max_ctas`, where the plan shows that
            no rank can then wait for ever; 0: none.
        p2p_transport: How messages travel between GPUs. "nccl", or "host": by way of host memory and gloo, where GPUs
            cannot reach each other, or several ranks share one. None: "host" where two ranks of the pipeline are on
            one GPU, otherwise "nccl".
        p2p_max_ctas: Over NCCL, multiprocessors that a message may occupy while it travels, and channels of NCCL that
            it travels by. With more, a large message takes less time over NVLink, and computations beside it more.
            NCCL_MAX_CTAS in the environment overrules it. Default: 4.
        deallocate_pipeline_outputs: Not looked at, only accepted for Megatron's sake: the memory of an output is always
            freed when it has been sent. Default: True.
        timeout: Seconds that a rank may wait for one message before the step fails with a report of where every rank
            is. The same on all ranks; if it changes between steps, connections are made anew. Default: 600.0.

        sequence_parallel: Tensor-parallel ranks divide the sequence length of the tensor between stages. Default:
            False.
        tensor_model_parallel_size: Tensor-parallel ranks. Default: 1.
        context_parallel_size: Context-parallel ranks, which divide that sequence length too. Default: 1.
        expert_model_parallel_size: Expert-parallel ranks. Default: 1.

        num_sequence_slices: How many slices each sequence is cut into, by schedules that can (seq1f1b and its kin).
            `forward_step_func` is then called for each slice, and what it and its layers do with it, they ask
            `megapipe.slices`. The loss of a slice is its part of the microbatch's: normalise it by all of that's
            positions, or return 3-tuples. Default: 1.
        sequence_slice_lengths: The length of each slice, adding up to seq_length. None: as equal as can be.

        microbatch_group_size_per_vp_stage: Microbatches that interleaved schedules run through a chunk before they turn
            to the next: the number of pipeline ranks or more. More hides slow messages at the price of activation
            memory. None: the number of pipeline ranks.
        max_in_flight: Most microbatches that a rank may hold, from F to W, in whole ranks (a chunk is its share of
            one). More let some schedules (1f1b, zb1p, zb2p, the interleaved ones) start further ahead and wait less.
            None: as many as the schedule holds by itself.
        min_pending_weights: As many Ws of a rank stay pending until its last B is done. In the overlap windows of Fs
            and Bs (`megapipe.overlap`) their products run while communication is under way. Each holds the activations
            of a chunk. Schedules have some pending by themselves. Default: 0.
        max_pending_weights: Most Ws of a rank that stay pending after a B. Fewer hold fewer activations, at the price
            of time: with 0 each W follows its B at once. None: as many as the schedule has, or 1 with `recompute` or
            `offload_activations`.
        recompute: What of a chunk's activations is not kept from F to B, but computed again by an action of its own
            (R), which comes before its B waits for a gradient: "all"; or the number of the chunk's last layers, where
            it has an nn.ModuleList or nn.Sequential of them; or a sequence with one of these, or None, for each stage
            of the pipeline. An F that its B follows at once keeps them all the same. Calls are run again with their
            random numbers and autocast. None: nothing.
        offload_activations: The time to copy to host memory what an F saves, over the time of that F. Activations are
            moved there while they wait for their B, as many as are back in time where F, B and W take equally long.
            None: they stay.
        max_gathered_chunks: Chunks of a rank, sharded by `fully_shard`, whose parameters are gathered at a time: that
            of the action and those that come next by the plan, which are gathered ahead. The others are sharded, and
            gathered again. None: each is gathered once in a step.
        weights_per_window: Gradients deferred to pending Ws, one product of matrices each, that are computed in an
            overlap window of an F or a B. More fit where windows are long. Default: 1.
        delay_wgrad_compute: Modules with a method `backward_dw()`, such as transformer-engine's built with this
            setting, defer their weight gradients by themselves: it is called in W, or at the end of a backward that is
            not split. Default: True.
        gc_interval: Steps between two collections of Python's garbage. A pause of one rank is a pause of all, so
            there is none within a step. The first follows the first step, and freezes what is there (`gc.freeze()`,
            unless you have frozen something); the others follow every so many steps. Where you have disabled
            collection, nothing of this is done. None: Python collects whenever it likes. Default: 100.

        broadcast_reports: Every rank of the pipeline gets the reports of the loss function, not only that of the last
            stage. Default: False.
        calculate_per_token_loss: With 3-tuple loss functions, do not divide the loss by tokens; hand their number to
            `finalize_model_grads_func`. Default: False.
        grad_scale_func: Called with the loss of each microbatch, a tensor without dimensions; its result is
            differentiated.
        no_sync_func: Returns a context without data-parallel gradient synchronisation; or a list, one per chunk.
        grad_sync_func: Called with a chunk's parameters as soon as its gradients are complete; or a list, one per
            chunk.
        param_sync_func: Called with a chunk's parameters before it is first used in a training step; or a list, one
            per chunk.
        finalize_model_grads_func: Called once after a training step with the list of chunks and the number of tokens,
            a float64 tensor without dimensions (None without `calculate_per_token_loss`).
        post_validated_optimizer: The megapipe.PostValidatedOptimizer that trains the model: schedules validate its last
            step before their first backward, and checkpoints wait for it.

        enable_autocast: Run forwards under torch.autocast. Default: False.
        autocast_dtype: Its dtype. None: `pipeline_dtype`.
        num_microbatches_with_partial_activation_checkpoints: Of the microbatches in flight at a time, this many
            checkpoint only in part; `forward_step_func` is told by a third argument, True where everything is to be
            recomputed (https://arxiv.org/abs/2205.05198, appendix C).

        timers: Megatron's timers: `timers(name, log_level=...)` returns an object with `start(barrier=...)` and
            `stop()`.
        barrier_with_L1_time: What that `barrier` is. Default: True.
        record_timeline: A megapipe.TimelineRecorder: it records when each action and each wait of the last training
            steps began and ended, at less than 2 us per action; `record_timeline.save(path)` makes one file of all
            ranks' records, for `megapipe show` and `tune`.

    Raises:
        ValueError, TypeError: for a value that cannot be.
    """

    # Messages
    hidden_size: int | None = None
    pipeline_dtype: torch.dtype | None = None
    variable_seq_lengths: bool = False
    overlap_p2p_comm: bool = True
    p2p_lookahead: int | None = None
    p2p_transport: str | None = None
    p2p_max_ctas: int = 4
    deallocate_pipeline_outputs: bool = True
    timeout: float = 600.0

    # The shape of the tensor between stages, and who shares it
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1

    # Schedules
    num_sequence_slices: int = 1
    sequence_slice_lengths: Sequence[int] | None = None
    microbatch_group_size_per_vp_stage: int | None = None
    max_in_flight: float | None = None
    min_pending_weights: int = 0
    max_pending_weights: int | None = None
    recompute: str | int | Sequence[str | int | None] | None = None
    offload_activations: float | None = None
    max_gathered_chunks: int | None = None
    weights_per_window: int = 1
    delay_wgrad_compute: bool = True
    gc_interval: int | None = 100

    # Loss, gradients and weights
    broadcast_reports: bool = False
    calculate_per_token_loss: bool = False
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    no_sync_func: Any = None
    grad_sync_func: Any = None
    param_sync_func: Any = None
    finalize_model_grads_func: Callable[..., None] | None = None
    post_validated_optimizer: ValidatedLater | None = None

    # Forward
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    num_microbatches_with_partial_activation_checkpoints: int | None = None

    # Measuring
    timers: Any = None
    barrier_with_L1_time: bool = True  # noqa: N815
    record_timeline: TimelineRecorder | None = None

    def __post_init__(self) -> None:
        for names, error, is_valid, what in CHECKS:
            for name in names:
                value, default = getattr(self, name), getattr(PipelineConfig, name)
                is_list = name in PER_CHUNK and isinstance(value, (list, tuple))
                for one in value if is_list else (value,):
                    if one is not default and not is_valid(one):
                        raise error(f"config.{name} must be {what}, got {one!r}.")

    @property
    def settings(self) -> Settings:
        """The settings that schedules know."""
        return Settings(
            self.microbatch_group_size_per_vp_stage,
            self.max_in_flight,
            self.min_pending_weights,
            self.max_pending_weights,
            tuple(map(bool, self.recompute)) if _is_per_stage(self.recompute) else bool(self.recompute),
            self.offload_activations,
        )

    def recompute_of(self, stage: int) -> str | int:
        """What `recompute` says of a stage. A plan that recomputes without it does so as a whole."""
        says = self.recompute[stage] if _is_per_stage(self.recompute) else self.recompute
        assert says is None or isinstance(says, (str, int))
        return says or "all"

    @classmethod
    def of(cls, config: object, **overrides: Any) -> PipelineConfig:
        """A config with the fields of `config`, defaults where it has none, and `overrides` in any case."""
        return cls(**{name: getattr(config, name, default) for name, default in DEFAULTS.items()} | overrides)


DEFAULTS: dict[str, Any] = {field.name: field.default for field in fields(PipelineConfig)}


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def checked(self: PipelineConfig, *values: Any, **given: Any) -> None:
        for name in given.keys() - DEFAULTS.keys():
            meant = nearest(name, {known: known for known in (*DEFAULTS, *NO_FIELDS)} | ELSEWHERE)
            where = f", {NO_FIELDS[meant]}" if meant in NO_FIELDS else ""
            guess = "help(megapipe.PipelineConfig) has all" if meant is None else f"do you mean {meant}{where}?"
            raise TypeError(f"PipelineConfig has no field {name!r}: {guess}")
        init(self, *values, **given)

    return checked


PipelineConfig.__init__ = _checked(PipelineConfig.__init__)  # type: ignore[method-assign]


EXTENSIONS = {
    "torch.distributed.fsdp": "megapipe.options.fully_shard:FullyShard",
    "num_sequence_slices": "megapipe.options.slicing:Slices",
    "post_validated_optimizer": "megapipe.options.post_validation:PostValidation",
    "enable_autocast": "megapipe.options.autocast:Autocast",
    "record_timeline": "megapipe.options.timeline:Timeline",
}
"""The extensions of options that take part in a step, in the order in which they are composed: by the fields of the
options, or by the module that is imported where they are in use. The room of an option is imported where it is set."""


def check_whole_number(name: str, value: Any, least: int, or_none: bool = False) -> None:
    """Raises ValueError where `value` is none."""
    if not (is_whole_number(value, least) or (or_none and value is None)):
        alternative = ", or None" if or_none else ""
        raise ValueError(f"{name} must be a whole number from {least} on{alternative}, got {value!r}.")


def is_whole_number(value: Any, least: int) -> bool:
    try:
        return operator.index(value) >= least
    except TypeError:
        return False


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _is_count_or_none(value: Any) -> bool:
    return value is None or is_whole_number(value, 1)


def _is_per_stage(value: Any) -> TypeGuard[Sequence[str | int | None]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _says_what_to_recompute(value: Any) -> bool:
    values = value if _is_per_stage(value) else [value]
    return all(one in (None, "all") or (is_whole_number(one, 0) and not isinstance(one, bool)) for one in values)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, Sequence) and all(is_whole_number(length, 1) for length in value)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, torch.dtype)


_SIZES = (
    *("tensor_model_parallel_size", "context_parallel_size", "expert_model_parallel_size", "num_sequence_slices"),
    "p2p_max_ctas",
)
_COUNTS = ("microbatch_group_size_per_vp_stage", "gc_interval", "max_gathered_chunks")
_FUNCTIONS = ("grad_scale_func", "finalize_model_grads_func", *PER_CHUNK)

CHECKS: list[tuple[tuple[str, ...], type[Exception], Callable[[Any], bool], str]] = [
    (("pipeline_dtype", "autocast_dtype"), TypeError, _is_dtype, "a torch.dtype, like torch.bfloat16, or None"),
    (
        ("p2p_lookahead", "max_pending_weights"),
        ValueError,
        lambda value: is_whole_number(value, 0),
        "a whole number from 0 on, or None",
    ),
    (
        ("min_pending_weights", "weights_per_window"),
        ValueError,
        lambda value: is_whole_number(value, 0),
        "a whole number from 0 on",
    ),
    (("p2p_transport",), ValueError, lambda value: value in ("nccl", "host"), "'nccl', 'host' or None"),
    (("timeout",), ValueError, _is_number, "a finite number"),
    (("max_in_flight",), ValueError, _is_number, "a finite number of microbatches, and no bytes"),
    (("offload_activations",), ValueError, lambda value: _is_number(value) and value > 0, "more than 0, or None"),
    (("timeout",), ValueError, lambda value: value > 0, "more than 0 seconds"),
    (("timeout",), ValueError, lambda value: value <= LONGEST, f"at most {LONGEST:g} seconds (30 years)"),
    (_SIZES, ValueError, lambda value: is_whole_number(value, 1), "a whole number from 1 on"),
    (_COUNTS, ValueError, _is_count_or_none, "a whole number from 1 on, or None"),
    (
        ("recompute",),
        ValueError,
        _says_what_to_recompute,
        '"all", a number of layers, None, or a sequence with one of these for each stage',
    ),
    (("sequence_slice_lengths",), ValueError, _are_lengths, "a sequence of whole numbers from 1 on, or None"),
    (_FUNCTIONS, TypeError, callable, "a function, or None"),
    (
        ("post_validated_optimizer",),
        TypeError,
        lambda value: isinstance(value, ValidatedLater),
        "a megapipe.PostValidatedOptimizer, or None",
    ),
    (
        ("record_timeline",),
        TypeError,
        lambda value: isinstance(value, TimelineRecorder),
        "a megapipe.TimelineRecorder, or None",
    ),
]
"""Fields, the error where a check fails, the check, and the values that pass besides the default."""
