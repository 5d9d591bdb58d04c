"""The settings of a pipeline: the fields of Megatron's ModelParallelConfig that matter here, and a few of ours.

The config is `model.config`, which may be any object with some of these fields (Megatron's own config, a dataclass
of yours, a namespace); those it lacks take the defaults below.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from .plan import Settings

__all__ = ["PER_CHUNK", "PipelineConfig", "check_whole_number"]

PER_CHUNK = ("no_sync_func", "grad_sync_func", "param_sync_func")
"""Settings that may be lists, with one function per chunk."""

LONGEST = 1e9  # seconds: transports count nanoseconds in 64 bits


@dataclass
class PipelineConfig:
    # Messages
    hidden_size: int | None = None
    """Last dimension of the tensor between stages, where the model does not compute its shapes itself."""
    pipeline_dtype: torch.dtype | None = None
    """dtype of the tensor between stages; None takes that of the model's first floating-point parameter."""
    variable_seq_lengths: bool = False
    """Microbatches differ in shape: a header with its shapes precedes each message."""
    overlap_p2p_comm: bool = True
    """Post receives before they are asked for. False posts each one only when its turn comes."""
    p2p_lookahead: int | None = None
    """How many receives each channel keeps posted ahead, on CPU and with p2p_transport="host". None: 2, and where a
    rank waits anyway as many as take a MiB together. Over NCCL, where a receive that waits occupies the device, each is
    posted when a step waits for it."""
    p2p_transport: str | None = None
    """How messages travel between GPUs. "nccl", or "host": by way of host memory and gloo, where GPUs cannot reach each
    other, or several ranks share one. None: "host" where two ranks of the pipeline are on one GPU, otherwise "nccl"."""
    deallocate_pipeline_outputs: bool = True
    """Accepted for Megatron's sake: a sent output is always freed as soon as it has left, only its graph is kept."""
    timeout: float = 600.0
    """Seconds a rank may wait for one message before the step fails with a report of where every rank is. The same on
    all ranks; another one than in the step before takes new connections."""

    # Sequence and tensor parallelism divide the sequence length of the tensor between stages
    sequence_parallel: bool = False
    tensor_model_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1

    # Schedules
    microbatch_group_size_per_vp_stage: int | None = None
    """How many microbatches interleaved schedules run through a chunk before they turn to the next: at least, and by
    default, the number of pipeline ranks. More hides slow messages at the price of activation memory."""
    max_in_flight: float | None = None
    """Most microbatches that a rank may hold, from F to W, counted in whole ranks (a chunk is its share of one). More
    let some schedules (1f1b, zb1p, zb2p, the interleaved ones) start further ahead and wait less."""
    delay_wgrad_compute: bool = True
    """Modules with a method `backward_dw()`, such as transformer-engine's built with this setting, put off their weight
    gradients by themselves: it is called in W, or at the end of a backward that is not split."""
    weight_grad_placement: str = "static"
    """Where schedules with a split backward run their Ws. "static": where the schedule says. "tuned": where the times
    measured in the last steps say that a step becomes shortest; gradients stay the same to the bit. Then a rank may
    hold a quarter of a pipeline's microbatches more than by the schedule, or `max_in_flight` where that is set."""

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError for what cannot be, before a rank waits for another one."""
        for name, least in (("p2p_lookahead", 0), ("microbatch_group_size_per_vp_stage", 1)):
            check_whole_number(f"config.{name}", getattr(self, name), least, or_none=True)
        for kind in ("tensor_model", "context", "expert_model"):
            check_whole_number(f"config.{kind}_parallel_size", getattr(self, f"{kind}_parallel_size"), 1)
        for name, number in (("timeout", self.timeout), ("max_in_flight", self.max_in_flight)):
            is_number = isinstance(number, (int, float)) and math.isfinite(number)
            if not is_number and (number is not None or name == "timeout"):
                raise ValueError(f"config.{name} must be a finite number, got {number!r}.")
        if self.timeout <= 0:
            raise ValueError(f"config.timeout must be more than 0 seconds, got {self.timeout:g}.")
        if self.timeout > LONGEST:
            raise ValueError(f"config.timeout must be at most {LONGEST:g} seconds (30 years), got {self.timeout:g}.")
        for name in ("pipeline_dtype", "autocast_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"config.{name} must be a torch.dtype, like torch.bfloat16, or None, got {dtype!r}.")
        if self.p2p_transport not in (None, "nccl", "host"):
            raise ValueError(f"config.p2p_transport must be 'nccl', 'host' or None, got {self.p2p_transport!r}.")
        if self.weight_grad_placement not in ("static", "tuned"):
            raise ValueError(
                f"config.weight_grad_placement must be 'static' or 'tuned', got {self.weight_grad_placement!r}."
            )
        for name in ("grad_scale_func", "finalize_model_grads_func", *PER_CHUNK):
            value = getattr(self, name)
            for function in value if name in PER_CHUNK and isinstance(value, (list, tuple)) else [value]:
                if function is not None and not callable(function):
                    raise TypeError(f"config.{name} must be a function, or None, got {function!r}.")
        optimizer = self.post_validated_optimizer
        if optimizer is not None and not hasattr(optimizer, "finalize_everywhere"):
            raise TypeError(
                "config.post_validated_optimizer must be a megapipe.PostValidatedOptimizer, or None, got a "
                f"{type(optimizer).__name__}."
            )
        if self.record_timeline is not None and not hasattr(self.record_timeline, "begin"):
            raise TypeError(
                f"config.record_timeline must be a megapipe.TimelineRecorder, or None, got {self.record_timeline!r}."
            )

    @property
    def settings(self) -> Settings:
        """What the schedules may be told."""
        return Settings(self.microbatch_group_size_per_vp_stage, self.max_in_flight)

    # Loss and gradients
    calculate_per_token_loss: bool = False
    """3-tuple loss functions: do not divide the loss by tokens; hand their number to `finalize_model_grads_func`."""
    grad_scale_func: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Called with the loss of each microbatch; its result is what is differentiated."""
    no_sync_func: Any = None
    """Returns a context without data-parallel gradient synchronisation; or a list of such, one per chunk."""
    grad_sync_func: Any = None
    """Called with a chunk's parameters as soon as its gradients are complete; or a list, one per chunk."""
    param_sync_func: Any = None
    """Called with a chunk's parameters before it is first used in a training step; or a list, one per chunk."""
    finalize_model_grads_func: Callable[..., None] | None = None
    """Called once after a training step with the list of chunks and the number of tokens (or None)."""

    post_validated_optimizer: Any = None
    """The megapipe.PostValidatedOptimizer that trains the model: schedules validate its last step before their first
    backward, and checkpoints wait for it."""

    # Forward
    enable_autocast: bool = False
    autocast_dtype: torch.dtype | None = None
    """None takes `pipeline_dtype`."""
    num_microbatches_with_partial_activation_checkpoints: int | None = None
    """Of the microbatches in flight at a time, this many checkpoint only in part; `forward_step_func` is told by a
    third argument, True where everything is to be recomputed (https://arxiv.org/abs/2205.05198, appendix C)."""

    # Measuring
    timers: Any = None
    """Megatron's timers: `timers(name, log_level=...)` returns an object with `start(barrier=...)` and `stop()`."""
    barrier_with_L1_time: bool = True  # noqa: N815
    record_timeline: Any = None
    """A megapipe.TimelineRecorder: writes down when each action and each wait of the last training steps began and
    ended, at less than 2 us per action; `record_timeline.save(path)` makes one file of all ranks' records, for
    `megapipe show` and `tune`."""

    @classmethod
    def of(cls, config: object, **overrides: Any) -> PipelineConfig:
        """A config with the fields of `config`, defaults where it has none, and `overrides` in any case."""
        return cls(**{f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)} | overrides)


def check_whole_number(name: str, value: Any, least: int, or_none: bool = False) -> None:
    """Raises ValueError where `value` is none."""
    if or_none and value is None:
        return
    try:
        is_valid = operator.index(value) >= least
    except TypeError:
        is_valid = False
    if not is_valid:
        alternative = ", or None" if or_none else ""
        raise ValueError(f"{name} must be a whole number from {least} on{alternative}, got {value!r}.")
