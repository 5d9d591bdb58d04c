"""What does not go together in one call: the traits that a call may have, and the pairs of them that are refused.

A new option that does not go with another is a row of `REFUSED`. Tests hold that every pair of traits is refused, tried
in some case, or listed in docs/limits.md as not tried.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from torch import nn

from ..chunks import wrapped_in
from ..plan import Plan
from ..stages import Call, find_delayed
from ..transports import is_capturing
from .plans import PlanKey


class Facts:
    """A call as traits see it: its arguments, the number of pipeline ranks, and the plan of a training step."""

    def __init__(self, call: Call, pp_size: int) -> None:
        self.call, self.config, self.pp_size = call, call.config, pp_size
        self.settings, self.is_plan = call.config.settings, call.schedule.sizes is not None
        self.trains = not call.forward_only
        self._said: dict[str, str] = {}

    def say(self, name: str) -> str:
        """The trait as an error tells it; nothing where the call does not have it."""
        if name not in self._said:
            value = TRAITS[name](self)
            told = name if value is True else f"{name}={value!r}" if name.isidentifier() else f"{name} ({value})"
            self._said[name] = "" if value is None or value is False else told
        return self._said[name]

    @cached_property
    def key(self) -> PlanKey:
        sizes = (self.pp_size, self.call.num_microbatches, len(self.call.models))
        return PlanKey(self.call.schedule, *sizes, self.settings, self.config.num_sequence_slices)

    @property
    def plan(self) -> Plan:
        return self.key.plan

    @property
    def modules(self) -> Iterator[nn.Module]:
        return (module for model in self.call.models for module in model.modules())


def _fully_shard(facts: Facts) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in facts.modules)


def _replicas_by_torch(facts: Facts) -> int | None:
    wrappers = [one for model in facts.call.models for one in wrapped_in(model)]
    sizes = [one.process_group.size() for one in wrappers if isinstance(one, nn.parallel.DistributedDataParallel)]
    return max([size for size in sizes if size > 1], default=None)


def _has_others_between(facts: Facts) -> bool:
    is_alone = facts.pp_size * len(facts.call.models) == 1
    return facts.trains and (not is_alone or facts.plan.splits_backward or facts.plan.peak_in_flight(0) > 1)


TRAITS: dict[str, Callable[[Facts], Any]] = {
    # The schedule and how it is called
    "several pipeline ranks": lambda of: of.pp_size > 1 and of.pp_size,
    "several chunks per rank": lambda of: len(of.call.models) > 1 and len(of.call.models),
    "a V placement": lambda of: of.call.schedule.placement.name == "v",
    "overlapped pairs": lambda of: of.trains and any(of.plan.program.pairs),
    "Ws apart from Bs": lambda of: of.trains and of.plan.splits_backward,
    "other actions between an F and its B": _has_others_between,
    "a plan": lambda of: of.is_plan and of.call.schedule.name,
    "a plan without R": lambda of: of.is_plan and "R" not in of.key.kinds and of.call.schedule.name,
    "a training step": lambda of: of.trains,
    "forward_only": lambda of: of.call.forward_only,
    "collect_non_loss_data": lambda of: of.call.collect_non_loss_data,
    "pipeline_inputs": lambda of: of.call.pipeline_inputs is not None,
    "a data_iterator without __next__()": lambda of: (
        not all(one is None or hasattr(one, "__next__") for one in of.call.data_iterators)
    ),
    "a CUDA graph of the whole step": lambda of: of.call.device.type != "cpu" and is_capturing(of.call.device),
    # The config
    "num_sequence_slices": lambda of: of.config.num_sequence_slices > 1 and of.config.num_sequence_slices,
    "context_parallel_size": lambda of: of.config.context_parallel_size > 1 and of.config.context_parallel_size,
    "variable_seq_lengths": lambda of: of.config.variable_seq_lengths,
    "recompute": lambda of: of.trains and of.settings.recomputes and of.config.recompute,
    "offload_activations": lambda of: of.config.offload_activations,
    "min_pending_weights": lambda of: of.trains and (of.config.min_pending_weights or None),
    "max_pending_weights": lambda of: of.trains and of.config.max_pending_weights,
    "num_microbatches_with_partial_activation_checkpoints": lambda of: (
        of.config.num_microbatches_with_partial_activation_checkpoints
    ),
    "calculate_per_token_loss": lambda of: of.config.calculate_per_token_loss,
    "grad_scale_func": lambda of: of.config.grad_scale_func is not None,
    "enable_autocast": lambda of: of.config.enable_autocast,
    "no_sync_func": lambda of: of.config.no_sync_func is not None,
    "grad_sync_func": lambda of: of.config.grad_sync_func is not None,
    "post_validated_optimizer": lambda of: of.config.post_validated_optimizer is not None,
    "record_timeline": lambda of: of.config.record_timeline is not None,
    "timers": lambda of: of.config.timers is not None,
    # The model
    "a captured stage": lambda of: any(getattr(module, "hands_on_state", True) is False for module in of.modules),
    "layers that put off weight gradients by themselves": lambda of: any(map(find_delayed, of.call.models)),
    "frozen parameters": lambda of: any(
        not one.requires_grad for model in of.call.models for one in model.parameters()
    ),
    "fully_shard": _fully_shard,
    "torch's DistributedDataParallel": _replicas_by_torch,
}
"""Whether a call has a trait: True, or what an error tells of it, such as a number; else None or False."""

_MADE_WITH_IT = (
    "a plan says itself what is computed again and when Ws run. Unset it, or make the plan with it: "
    "make_plan(..., settings=Settings({}=...))"
)

REFUSED: dict[tuple[str, str], str] = {
    ("num_sequence_slices", "context_parallel_size"): "cut sequences one way only, or use 1 slice",
    ("num_sequence_slices", "variable_seq_lengths"): "pad sequences to one seq_length, or use 1 slice",
    ("num_sequence_slices", "pipeline_inputs"): "leave it None, for inputs of a slice's length, or use 1 slice",
    ("num_sequence_slices", "post_validated_optimizer"): "clip before the optimizer's step, or use 1 slice",
    ("num_sequence_slices", "num_microbatches_with_partial_activation_checkpoints"): "leave it None, or use 1 slice",
    ("num_sequence_slices", "a captured stage"): ("its graph hands on no state, so do not capture it, or use 1 slice"),
    ("num_sequence_slices", "a data_iterator without __next__()"): (
        "pass an iterator, whose items all slices read, or use 1 slice"
    ),
    ("num_sequence_slices", "offload_activations"): (
        "each slice is needed by those after it, so leave activations where they are, or use 1 slice"
    ),
    ("post_validated_optimizer", "a data_iterator without __next__()"): (
        "forwards may have to be run again, so pass an iterator, whose items can be kept: iter(...) of it"
    ),
    ("recompute", "a plan without R"): _MADE_WITH_IT.format("recompute"),
    ("min_pending_weights", "a plan"): _MADE_WITH_IT.format("min_pending_weights"),
    ("max_pending_weights", "a plan"): _MADE_WITH_IT.format("max_pending_weights"),
    ("collect_non_loss_data", "a training step"): (
        "it asks loss_func for other things than a loss, so nothing would be trained: pass forward_only=True with it, "
        "or leave it out"
    ),
    ("torch's DistributedDataParallel", "other actions between an F and its B"): (
        "it prepares its reduction in a forward and would not reduce the gradients of its replicas in the backward of "
        "another, so take megapipe.training.GradientReducer or fully_shard instead"
    ),
    ("a CUDA graph of the whole step", "several pipeline ranks"): (
        "its replays would wait for ever for a rank that is gone. Run the step as it is, with stages captured by "
        "megapipe.graph.capture"
    ),
    ("a CUDA graph of the whole step", "record_timeline"): "replays run without the host, which measures: unset it",
    ("a CUDA graph of the whole step", "timers"): "replays run without the host, which measures: unset it",
}
"""The remedy for each pair that does not go together."""


def check_combinations(call: Call, pp_size: int) -> None:
    """Raises ValueError for the first pair of `REFUSED` that a call has."""
    facts = Facts(call, pp_size)
    for (one, other), remedy in REFUSED.items():
        if facts.say(one) and facts.say(other):
            raise ValueError(f"{facts.say(one)} does not go with {facts.say(other)}: {remedy}.")
