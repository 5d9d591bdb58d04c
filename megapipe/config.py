"""The settings of a pipeline. A field is one entry: its type, its default, its check and its text.

The config is `model.config`, which may be any object with some of these fields (Megatron's own config, a dataclass
of yours, a namespace); those it lacks take the defaults below.
"""

# ruff: noqa: RUF009  # `setting` is as good as `field`

from __future__ import annotations

import functools
import inspect
import math
import operator
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, TypeGuard, TypeVar

import torch

from .plan import Settings, nearest

PER_CHUNK = ("no_sync_func", "grad_sync_func", "param_sync_func")
"""Settings that may be lists, with one function per chunk."""

# Checks


class Check(NamedTuple):
    """The values that a field may have besides its default."""

    what: str
    is_valid: Callable[[Any], bool]
    error: type[Exception] = ValueError


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Raises ValueError if `value` is not a whole number of at least `least`."""
    if not is_whole_number(value, least):
        raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}.")


def is_whole_number(value: Any, least: int) -> bool:
    try:
        return not isinstance(value, bool) and operator.index(value) >= least
    except TypeError:
        return False


def whole(least: int, or_none: bool = False) -> Check:
    what = f"a whole number from {least} on" + (", or None" if or_none else "")
    return Check(what, lambda value: (or_none and value is None) or is_whole_number(value, least))


def number(what: str, above: float = -math.inf, most: float = math.inf) -> Check:
    def is_valid(value: Any) -> bool:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        return is_number and above < value <= most

    return Check(what, is_valid)


def instance(what: str, *attributes: str) -> Check:
    return Check(what, lambda value: all(hasattr(value, name) for name in attributes), TypeError)


def _is_per_stage(value: Any) -> TypeGuard[Sequence[str | int | None]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _says_what_to_recompute(value: Any) -> bool:
    values = value if _is_per_stage(value) else [value]
    return all(one is None or is_whole_number(one, 0) or (isinstance(one, str) and one == "all") for one in values)


def _plain(value: Any) -> Any:
    """A whole number of NumPy's or torch's, or NumPy's float64, as Python's. A list becomes a tuple, whose items cannot
    be set unchecked."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value)) if type(value) in (list, tuple) else value
    if isinstance(value, float):
        return float(value)
    return operator.index(value) if hasattr(value, "__index__") and not isinstance(value, (bool, int)) else value


BOOL = Check("True or False", lambda value: isinstance(value, bool), TypeError)
DTYPE = Check("a torch.dtype, like torch.bfloat16", lambda value: isinstance(value, torch.dtype), TypeError)
SECONDS = number("more than 0 and at most 1e9 seconds (30 years)", 0, 1e9)  # counted in nanoseconds, in 64 bits
TRANSPORT = Check("'nccl' or 'host'", lambda value: value in ("nccl", "host"))
LENGTHS = Check(
    "a sequence of whole numbers from 1 on",
    lambda value: _is_per_stage(value) and all(is_whole_number(one, 1) for one in value),
)
RECOMPUTE = Check('"all", a number of layers, a sequence with one of these for each stage', _says_what_to_recompute)
FUNCTION = Check("a function", callable, TypeError)
FUNCTIONS = Check(
    "a function, a list of them",
    lambda value: all(map(callable, value)) if isinstance(value, (list, tuple)) else callable(value),
    TypeError,
)
OPTIMIZER = instance("a megapipe.PostValidatedOptimizer", "has_pending_step", "validate", "finalize_everywhere")
RECORDER = instance("a megapipe.TimelineRecorder", "begin", "keep")

# What is no field

_NO_FIELDS = {
    "an argument of the schedule's call": "num_microbatches seq_length micro_batch_size decoder_seq_length "
    "forward_only forward_step_func data_iterator",
    "an argument of parallel_state.initialize_model_parallel": "pipeline_model_parallel_size "
    "virtual_pipeline_model_parallel_size",
    "the argument of get_forward_backward_func": "schedule",
}
"""Names of what users say at another place, by that place."""

_ELSEWHERE = {
    "n_microbatches": "num_microbatches",
    "params_dtype": "pipeline_dtype",
    "dtype": "pipeline_dtype",
    "recompute_granularity": "recompute",
    "recompute_num_layers": "recompute",
    "activation_checkpointing": "recompute",
}
"""Names that Megatron, torch and others have for the same."""


def _no_field(cls: type[PipelineConfig], name: str) -> TypeError:
    own = cls.__dataclass_fields__.keys()
    places = {other: where for where, names in _NO_FIELDS.items() for other in names.split()}
    places |= dict.fromkeys(DEFAULTS.keys() - own, "read where the config is another object, such as Megatron's")
    meant = nearest(name, {known: known for known in (*own, *places)} | _ELSEWHERE)
    where = f", {places[meant]}" if meant in places else ""
    guess = "help(megapipe.PipelineConfig) has all" if meant is None else f"do you mean {meant}{where}?"
    return TypeError(f"PipelineConfig has no field {name!r}: {guess}")


# Fields

Config = TypeVar("Config", bound="PipelineConfig")


def setting(default: Any, check: Check, text: str) -> Any:
    """A field of a config."""
    return field(default=default, metadata={"check": check, "text": " ".join(text.split())})


def _documented(cls: type[Config]) -> type[Config]:
    """The docstring of a config lists its fields, and its constructor tells what is meant by a wrong one."""
    texts = []
    for one in fields(cls):
        default = "" if one.default is None else f" Default: {one.default!r}."
        texts.append("\n        ".join(textwrap.wrap(f"{one.name}: {one.metadata['text']}{default}", 108)))
    # Up to Python 3.12 a docstring has the indentation of its lines.
    cls.__doc__ = "\n    ".join([f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAttributes:", *texts])
    init: Callable[..., None] = cls.__init__

    @functools.wraps(init)
    def checked(self: Config, *values: Any, **given: Any) -> None:
        for name in given.keys() - cls.__dataclass_fields__.keys():
            raise _no_field(cls, name)
        init(self, *values, **given)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


# fmt: off
@_documented
@dataclass
class PipelineConfig:
    """How a pipeline communicates, schedules and trains. The same on every rank.

    The default of a field is None where nothing else is said. ValueError or TypeError is raised where a field is set
    to what it cannot be, and where there is no such field.
    """

    # Messages
    pipeline_dtype: torch.dtype | None = setting(None, DTYPE, """The dtype of the tensor between stages. None: that of
        the model's first floating-point parameter.""")
    variable_seq_lengths: bool = setting(False, BOOL, """Microbatches differ in shape: a header with its shapes precedes
        each message.""")
    p2p_lookahead: int | None = setting(None, whole(0), """Receives that each channel keeps posted ahead, on CPU and
        with p2p_transport="host". None: 2, and before a rank's first wait in a step more, up to 1 MiB on each channel.
        Over NCCL, where a receive that waits occupies the device, None and 0 post each when it is needed. With 1 those
        of messages above 0.5 MiB times `p2p_max_ctas` (2 MiB at most) are posted one action early, where no rank can
        then wait for ever.""")
    p2p_transport: str | None = setting(None, TRANSPORT, """How messages travel between GPUs. "nccl", or "host": by way
        of host memory and gloo, where GPUs cannot reach each other, or several ranks share one. None: "host" where two
        ranks of the pipeline are on one GPU, otherwise "nccl".""")
    p2p_max_ctas: int = setting(4, whole(1), """Over NCCL, multiprocessors that a message may occupy while it travels,
        and channels of NCCL that it travels by. More make large messages over NVLink faster, and computations that run
        at the same time slower. NCCL_MAX_CTAS in the environment overrules it.""")
    timeout: float = setting(600.0, SECONDS, """Seconds that a rank may wait for one message before the step fails with
        a report of where every rank is. The same on all ranks.""")

    # Schedules
    num_sequence_slices: int = setting(1, whole(1), """How many slices each sequence is cut into, by schedules that can
        (those with "seq" in their names). `forward_step_func` is then called for each slice, and layers read the
        current slice from `megapipe.slices`. Losses of slices are added up: divide the loss of a slice by the number of
        positions of the whole sequence, or return 3-tuples.""")
    sequence_slice_lengths: Sequence[int] | None = setting(None, LENGTHS, """The length of each slice. They add up to
        seq_length. None: as equal as possible.""")
    microbatch_group_size_per_vp_stage: int | None = setting(None, whole(1), """Microbatches that interleaved schedules
        run through a chunk before they turn to the next: at least the number of pipeline ranks (with slices: ranks /
        slices, rounded up). More hide slow messages, and take more activation memory. None: the smallest number that
        works, or the largest that `max_in_flight` allows.""")
    max_in_flight: float | None = setting(None, number("a number of microbatches (not bytes)"), """The most
        that a rank may hold, from F to W: 1.0 is the activations of one microbatch in all chunks of a rank, so one
        chunk of v counts 1/v. More let some schedules (1f1b, zb1p, zb2p, the interleaved and combined ones) start
        further ahead and wait less. None: what the schedule needs.""")
    min_pending_weights: int = setting(0, whole(0), """This many Ws of a rank are held back until its last B, so that
        there are some to compute. They are computed in the overlap windows of Fs and Bs (`megapipe.overlap`), while
        communication is under way. Each holds the activations of a chunk. Some schedules keep Ws pending without
        it.""")
    max_pending_weights: int | None = setting(None, whole(0), """At most this many Ws of a rank are pending after a B.
        Fewer hold fewer activations, and may cost time: with 0 each W follows its B at once. None: what the schedule
        needs, or 1 with `recompute` or `offload_activations`.""")
    recompute: str | int | Sequence[str | int | None] | None = setting(None, RECOMPUTE, """Which activations of a chunk
        are not kept from F to B, but recomputed by an action of its own (R), which runs while B's gradient is on its
        way: "all"; or a number of the chunk's last layers, if it has an nn.ModuleList or nn.Sequential of them; or a
        sequence with one of these, or None, for each stage of the pipeline. An F that its B follows at once keeps its
        activations. Layers are run again with the same random numbers and autocast. None: nothing is recomputed.""")
    offload_activations: float | None = setting(None, number("more than 0", 0), """A ratio of times (such as 0.5): the
        time to copy to host memory what an F saves, divided by the time of that F. With it, activations are moved to
        host memory while they wait for their B: those that lower the peak and can be back in time, if F, B and W take
        equally long. None: they stay in device memory.""")
    max_gathered_chunks: int | None = setting(None, whole(1), """How many chunks of a rank, sharded by `fully_shard`,
        may have their parameters gathered at a time: that of the current action, and those that the plan runs next,
        which are gathered ahead. The others are sharded, and gathered again. None: each is gathered once in a step.""")
    weights_per_window: int = setting(1, whole(0), """How many deferred weight gradients, one matrix product each, are
        computed in one overlap window of an F or a B. Long windows have room for more.""")

    # Loss, gradients and weights
    broadcast_reports: bool = setting(False, BOOL, """Every rank of the pipeline gets the reports of the loss function,
        not only that of the last stage.""")
    calculate_per_token_loss: bool = setting(False, BOOL, """With 3-tuple loss functions, divide the loss neither by
        tokens nor by microbatches; hand the number of tokens to `finalize_model_grads_func`.""")
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = setting(None, FUNCTION, """Called with the loss of
        each microbatch, a tensor without dimensions; its result is differentiated.""")
    grad_sync_func: Any = setting(None, FUNCTIONS, """Called with a chunk's parameters as soon as its gradients are
        complete; or a list, one per chunk.""")
    finalize_model_grads_func: Callable[..., None] | None = setting(None, FUNCTION, """Called once after a training step
        with the list of chunks and the number of tokens, a float64 tensor without dimensions (None without
        `calculate_per_token_loss`).""")
    post_validated_optimizer: Any = setting(None, OPTIMIZER, """The megapipe.PostValidatedOptimizer that trains the
        model: schedules check its last step before their first backward, and checkpoints wait for it.""")

    # Forward
    enable_autocast: bool = setting(False, BOOL, "Run forwards under torch.autocast.")
    autocast_dtype: torch.dtype | None = setting(None, DTYPE, "Its dtype. None: `pipeline_dtype`.")

    # Measuring
    record_timeline: Any = setting(None, RECORDER, """A megapipe.TimelineRecorder: it records when each action and each
        wait of the last training steps began and ended, at less than 2 us per action; `record_timeline.save(path)`
        makes one file of all ranks' records, for `megapipe show` and `tune`.""")

    # fmt: on
    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dataclass_fields__:
            raise _no_field(type(self), name)
        one = self.__dataclass_fields__[name]
        check = one.metadata.get("check")  # fields that a class of the user's adds have none
        if check is not None and value is not one.default:
            if not check.is_valid(value):
                what = check.what + (", or None" if one.default is None else "")
                raise check.error(f"config.{name} must be {what}, got {value!r}.")
            value = _plain(value)
        object.__setattr__(self, name, value)

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
        """What is recomputed of a stage where a plan has R for it: what `recompute` says, or "all" where it says
        nothing."""
        says = self.recompute[stage] if _is_per_stage(self.recompute) else self.recompute
        assert says is None or isinstance(says, (str, int))
        return says or "all"

    @staticmethod
    def of(config: object, **overrides: Any) -> StepConfig:
        """A config with the fields of `config`, defaults where it has none, and `overrides` in any case."""
        if isinstance(config, Mapping):
            raise TypeError("a config has its settings as attributes, got a dict: pass megapipe.PipelineConfig(**it).")
        if isinstance(config, PipelineConfig):  # which was checked where it was set
            made = object.__new__(StepConfig)
            vars(made).update({name: getattr(config, name, default) for name, default in DEFAULTS.items()})
            for name, value in overrides.items():
                setattr(made, name, value)
            return made
        return StepConfig(**{name: getattr(config, name, default) for name, default in DEFAULTS.items()} | overrides)


# fmt: off
@_documented
@dataclass
class StepConfig(PipelineConfig):
    """The settings of a step: those of `PipelineConfig`, and fields that are read only from other configs, such as
    Megatron's."""

    # Read from Megatron's config
    hidden_size: int | None = setting(None, whole(1), """Last dimension of the tensor between stages, where the model
        does not compute its shapes itself.""")
    sequence_parallel: bool = setting(False, BOOL, "Tensor-parallel ranks divide the sequence length of that tensor.")
    tensor_model_parallel_size: int = setting(1, whole(1), "Tensor-parallel ranks.")
    context_parallel_size: int = setting(1, whole(1), "Context-parallel ranks, which divide that sequence length too.")
    overlap_p2p_comm: bool = setting(True, BOOL, """Whether receives may be posted before they are needed, as
        `p2p_lookahead` says. False has the effect of `p2p_lookahead=0`.""")
    no_sync_func: Any = setting(None, FUNCTIONS, """Returns a context without data-parallel gradient synchronisation; or
        a list, one per chunk.""")
    param_sync_func: Any = setting(None, FUNCTIONS, """Called with a chunk's parameters before it is first used in a
        training step; or a list, one per chunk.""")
    delay_wgrad_compute: bool = setting(True, BOOL, """Modules with a method `backward_dw()`, such as
        transformer-engine's built with this setting, defer their weight gradients by themselves: it is called in W, or
        at the end of a backward that is not split.""")
    num_microbatches_with_partial_activation_checkpoints: int | None = setting(None, whole(0), """Of the microbatches in
        flight at a time, this many checkpoint only in part; `forward_step_func` is told by a third argument, True where
        everything is to be recomputed (https://arxiv.org/abs/2205.05198, appendix C).""")
    timers: Any = setting(None, FUNCTION, """Megatron's timers: `timers(name, log_level=...)` returns an object with
        `start(barrier=...)` and `stop()`.""")
    barrier_with_L1_time: bool = setting(True, BOOL, "Passed to these timers as `barrier=`.")  # noqa: N815


# fmt: on
DEFAULTS: dict[str, Any] = {one.name: one.default for one in fields(StepConfig)}


class Option(NamedTuple):
    """An option that takes part in a step by an `Extension`, if one of `field`, `module` and `kind` says so. The module
    of the extension is imported only then."""

    extension: str
    """Where the class is: "module:name"."""
    field: str = ""
    """The option is used if this field of the config differs from its default."""
    module: str = ""
    """The option is used if this module has been imported."""
    kind: str = ""
    """The option is used if the plan that is run has this kind of action."""


OPTIONS = (
    Option("megapipe.options.fully_shard:FullyShard", module="torch.distributed.fsdp"),
    Option("megapipe.options.autocast:Autocast", "enable_autocast"),
    Option("megapipe.options.activations:Recompute", "recompute", kind="R"),
    Option("megapipe.options.activations:Offloading", "offload_activations", kind="O"),
    Option("megapipe.options.post_validation:PostValidation", "post_validated_optimizer"),
    Option("megapipe.options.slicing:Slices", "num_sequence_slices"),
    Option("megapipe.options.timers:Timers", "timers"),
    Option("megapipe.options.timers:RecordTimeline", "record_timeline"),
)
"""All options, in the order in which their wrappers are nested: the last one is outermost."""


def common_config(configs: Iterable[Any]) -> Any:
    """Returns the config of a rank's first chunk that has one: all chunks of a rank must share one config.

    Raises:
        ValueError: the config of another chunk has another value.
    """
    first = None
    for other in configs:
        first = other if first is None else first
        for name, default in DEFAULTS.items() if other is not None and other is not first else ():
            value, says = (getattr(config, name, default) for config in (first, other))
            if says is not value and says not in (value, default):
                raise ValueError(
                    f"config.{name} is {says!r} for one of this rank's chunks and {value!r} for the first, whose "
                    "settings are those of all: give all chunks one config."
                )
    return first
