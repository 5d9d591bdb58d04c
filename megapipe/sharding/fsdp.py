"""Chunks with parameters sharded by torch's `fully_shard` (FSDP2), over the microbatches of one step.

By itself FSDP2 gathers parameters for each forward and reduces gradients in each backward, as soon as autograd has
passed by; in a pipeline that is once per microbatch, and too early where a W is still to come. Here a chunk's
parameters are gathered once per step, ahead of its first forward, or as often as a plan says that keeps few chunks
gathered. Gradients are kept whole. Once the chunk's last W is done they are reduced and the parameters sharded again:
on a device, beside what other chunks still compute.

`root.py` makes FSDP2 do that by torch 2.15's public functions, `private.py` by the internals of older torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from .private import PrivateRoot
from .root import Root


class ShardedChunks(AbstractContextManager["ShardedChunks"]):
    """The context of one step of chunks of which some hold modules of `fully_shard` (or of `replicate`, which is built
    on it).

    What the user has set on a module (`set_requires_gradient_sync` and its kin) says what becomes of the whole step's
    gradients, as it does for those of one backward elsewhere.
    """

    def __init__(self, models: Sequence[nn.Module], forward_only: bool) -> None:
        self._chunks = [[_make_root(module, forward_only) for module in _roots(model)] for model in models]
        self._planned: Sequence[Sequence[int]] = ()
        self._num_actions = 0
        self._gathered: set[int] = set()

    @classmethod
    def find(cls, models: Sequence[nn.Module], forward_only: bool, is_reduced_elsewhere: bool) -> ShardedChunks | None:
        """None where no chunk is sharded.

        Args:
            is_reduced_elsewhere: the caller has functions of their own for gradients.

        Raises:
            ValueError: for a way of sharding that a pipeline cannot work with.
            RuntimeError: where this torch's FSDP2 is not as expected.
        """
        if "torch.distributed.fsdp" not in sys.modules:  # then it is not in use, and importing it takes time
            return None
        for number, model in enumerate(models):
            _refuse_fsdp1(number, model)
        if not any(_is_fsdp(module) for model in models for module in model.modules()):
            return None
        sharded = cls(models, forward_only)
        if not forward_only:
            for root in sharded._roots():
                root.check(sharded._roots())
            for number, model in enumerate(models) if not is_reduced_elsewhere else ():
                _check_all_reduced(number, model, sharded._chunks[number])
        return sharded

    def __enter__(self) -> ShardedChunks:
        for root in self._roots():
            root.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            for root in self._roots():
                root.end()

    def follow(self, planned: Sequence[Sequence[int]]) -> None:
        """Gather and shard chunks by a plan.

        Args:
            planned: for each action of the rank the chunks that are gathered, that of the action first.
        """
        self._planned = planned

    @property
    def follows_plan(self) -> bool:
        return bool(self._planned)

    def before_action(self) -> None:
        """Shard and gather what the plan has for the next action."""
        if not self._planned:
            return
        chunks = self._planned[self._num_actions]
        self._num_actions += 1
        for chunk in sorted(self._gathered.difference(chunks)):
            self._gathered.remove(chunk)
            for root in self._chunks[chunk]:
                root.reshard()
        for chunk in chunks:
            if chunk not in self._gathered:
                self._gathered.add(chunk)
                self.gather(chunk)
        self.wait_for_gathers(chunks[0])  # a replay does not pass by FSDP2's hooks

    def gather(self, chunk: int) -> None:
        """Start to gather the parameters of a chunk."""
        for root in self._chunks[chunk]:
            root.gather()

    def wait_for_gathers(self, chunk: int) -> None:
        """Wait for all parameters of a chunk, also those that no forward has waited for."""
        for root in self._chunks[chunk]:
            root.wait_for_gathers()

    def add_up(self, chunk: int) -> None:
        """Add a W's gradients up in the dtype that they are reduced in, as FSDP2 does after a backward."""
        for root in self._chunks[chunk]:
            root.add_up()

    def reduce(self, chunk: int) -> None:
        """Reduce the gradients of a chunk, which are complete: on a device beside the rest of the step."""
        self._gathered.discard(chunk)
        for root in self._chunks[chunk]:
            root.reduce()

    def fail(self) -> None:
        """The step has failed: what is left of it is no part of the next one. Waits for nobody."""
        for root in self._roots():
            root.fail()

    def _roots(self) -> Iterator[Root]:
        for roots in self._chunks:
            yield from roots


def output_dtype(model: nn.Module) -> torch.dtype | None:
    """The dtype in which a sharded chunk's mixed precision has it compute; None where it has none."""
    for module in _roots(model) if "torch.distributed.fsdp" in sys.modules else ():
        policy = module._get_fsdp_state()._mp_policy
        return policy.output_dtype or policy.param_dtype  # type: ignore[no-any-return]
    return None


def _is_fsdp(module: nn.Module) -> bool:
    from torch.distributed.fsdp import FSDPModule

    return isinstance(module, FSDPModule)


def _roots(module: nn.Module) -> Iterator[Any]:
    if _is_fsdp(module):
        yield module
    else:
        for child in module.children():
            yield from _roots(child)


def _make_root(module: nn.Module, forward_only: bool) -> Root:
    from torch.distributed.fsdp import FSDPModule

    try:
        if hasattr(FSDPModule, "finalize_backward"):
            return Root(module, forward_only)
        if torch.__version__ < "2.15":
            return PrivateRoot(module, forward_only)
        raise AttributeError("there is no finalize_backward")
    except AttributeError as error:
        raise RuntimeError(
            f"fully_shard of torch {torch.__version__} is not as megapipe knows it ({error}): use torch 2.15, one from "
            "2.9 to 2.14, or megapipe.training.GradientReducer."
        ) from error


def _refuse_fsdp1(number: int, model: nn.Module) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise ValueError(
            f"chunk {number} holds a FullyShardedDataParallel, which frees its whole parameters behind every backward, "
            "also while other microbatches that have gone forward need them: use torch.distributed.fsdp.fully_shard."
        )


def _check_all_reduced(number: int, model: nn.Module, roots: Sequence[Root]) -> None:
    managed = {parameter for root in roots for parameter in root.parameters()}
    for name, parameter in model.named_parameters():
        if managed and parameter.requires_grad and parameter not in managed:
            raise ValueError(
                f"{name} of chunk {number} is in no module of fully_shard, though others are, so its gradient is not "
                "averaged over the replicas: call fully_shard on the chunk too, or set config.grad_sync_func or "
                "config.finalize_model_grads_func (see megapipe.training)."
            )
