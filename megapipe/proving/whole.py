"""The model that everything is compared with: whole, in one process, microbatch by microbatch, in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from ..chunks import find_attribute
from ..config import StepConfig
from ..options import sequence_slices
from ..overlap import Segments
from ..slices import CarriedState

OfKind = TypeVar("OfKind", bound="Whole")


class Whole:
    """The unpartitioned model.

    Args:
        modules: the model; or all of its stages, which are run one after the other.
        forward_step: as a schedule is given it.
        config: that of the pipeline's chunks. It says what losses are divided by, and whether sequences are cut: then
            they are here, too, slice by slice.
        seq_length: of the sequences that are cut.

    Attributes:
        num_tokens: what the loss functions have counted, by microbatch.
    """

    def __init__(
        self, modules: Sequence[nn.Module], forward_step: Callable[..., Any], config: Any = None, seq_length: Any = None
    ) -> None:
        self.modules, self.forward_step, self.config = modules, forward_step, StepConfig.of(config)
        self.slices = sequence_slices(self.config, seq_length) if self.config.num_sequence_slices > 1 else []
        self.num_tokens: list[float] = []

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for module in self.modules for p in module.parameters()))

    def step(self, data: Sequence[Any], forward_only: bool = False) -> list[Any]:
        """One step. Gradients are added to those that are there; of a loss per token they are sums over all tokens.

        Args:
            data: the microbatches.

        Returns:
            What is reported of each of them.
        """
        return [self.run(batch, len(data), forward_only) for batch in data]

    def step_of_replicas(
        self,
        data: Sequence[Sequence[Any]],
        forward_only: bool = False,
        begin: Callable[[int], Any] = lambda replica: None,
    ) -> list[list[Any]]:
        """One step of several replicas, one after the other, whose gradients are averaged.

        Args:
            data: the microbatches of each.
            begin: called before each replica's, with its number.

        Returns:
            What each reports.
        """
        reports, gradients = [], []
        for replica, own in enumerate(data):
            begin(replica)
            self.forget_gradients()
            reports.append(self.step(own, forward_only))
            gradients.append([parameter.grad for parameter in self.parameters])
        for parameter, grad in zip(self.parameters, mean_of_replicas(gradients)):
            parameter.grad = grad
        return reports

    def run(self, batch: Any, num_microbatches: int, forward_only: bool = False) -> Any:
        """Forward and backward of one microbatch, of so many. Returns its report."""
        state = CarriedState(needs_grad=not forward_only)
        parts = []
        for context in [state.forward(this) for this in self.slices] or [nullcontext()]:
            with context, torch.set_grad_enabled(not forward_only):
                parts.append(self.forward(batch))
        tokens = sum(torch.as_tensor(part[1]).detach().sum() for part in parts) if len(parts[0]) == 3 else None
        if tokens is not None:
            self.num_tokens.append(float(tokens))
        losses = [] if forward_only else [self._divided(loss, num_microbatches, tokens) for loss, *_ in parts]
        for this, loss in zip(reversed(self.slices), reversed(losses)):
            with state.backward(this):
                _backward(loss, state.roots(this.index))
        if not self.slices and losses:
            _backward(losses[0])
        return added([report for *_, report in parts])

    def _divided(self, loss: Any, num_microbatches: int, tokens: Any) -> Any:
        """What is differentiated. Divisions are in the order of a step, since each rounds."""
        if tokens is None:
            return loss * self.config.context_parallel_size / num_microbatches
        if self.config.calculate_per_token_loss:
            return loss
        tokens = tokens if tokens > 0 else 1
        return loss / num_microbatches / tokens if self.slices else loss / tokens / num_microbatches

    def forward(self, batch: Any) -> tuple[Any, ...]:
        """What the loss function returns of a microbatch, or of the current slice of one."""
        received: Any = None
        for index, module in enumerate(self.modules):
            if (hand := find_attribute(module, "set_input_tensor")) is not None:
                hand([received] if index == 0 or isinstance(received, Tensor) else received)
            received, loss_func = self.forward_step(iter([batch]), module)
            if isinstance(received, Segments):
                received = received.finish()
        found: tuple[Any, ...] = loss_func(received)
        return found

    def uncut(self: OfKind) -> OfKind:
        """The same model, by whole sequences."""
        other = copy.copy(self)
        other.slices, other.num_tokens = [], []
        return other

    def forget_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


def _backward(loss: Tensor, others: Sequence[tuple[GradientEdge, Tensor]] = ()) -> None:
    """Begin at a loss, and at what later slices have gradients for."""
    ends: list[tuple[Any, Tensor]] = [*others, (loss, torch.ones_like(loss))] if loss.requires_grad else [*others]
    if ends:
        torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])


def added(reports: Sequence[Any]) -> Any:
    """One report of those of all slices: numbers are added, of anything else the last one counts."""

    def add(*parts: Any) -> Any:
        return sum(parts[1:], parts[0]) if isinstance(parts[0], (Tensor, int, float, complex)) else parts[-1]

    return reports[0] if len(reports) == 1 else tree_map(add, *reports)


def mean_of_replicas(gradients: Iterable[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The means of gradients, by parameter. A replica that has none counts as one of zeros."""
    means: list[Tensor | None] = []
    for grads in zip(*gradients):
        there = [grad for grad in grads if grad is not None]
        means.append(sum(there[1:], there[0].clone()) / len(grads) if there else None)
    return means
