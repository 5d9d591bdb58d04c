"""The model that everything is compared with: whole, in one process, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..chunks import find_attribute
from .names import buffers_of, copy_into, parameters_of, tensors_of
from .question import Question

Values = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass
class WholeStep:
    """What one step of the whole model gives.

    Attributes:
        reports: by replica and microbatch.
        gradients: those of the mean over all microbatches of all replicas.
        weights, buffers: after the optimizer's step. Each replica has buffers of its own: these are the first's.
        before: weights and buffers before the step.
    """

    reports: list[list[Any]]
    gradients: Gradients
    weights: Values
    buffers: Values
    before: Values


class Whole:
    """The unpartitioned model.

    Args:
        modules: the model; or all of its stages, which are run one after the other.
    """

    def __init__(self, question: Question, modules: Sequence[nn.Module]) -> None:
        self.question, self.modules = question, modules
        self.is_chain = len(modules) > 1
        self.parameters: dict[str, nn.Parameter] = self._each(parameters_of)
        self.tensors: Values = self._each(tensors_of)
        self.buffers: Values = self._each(buffers_of)
        self._distinct = list(dict.fromkeys(self.parameters.values()))

    def _each(self, tensors: Any) -> dict[str, Any]:
        return {
            self.key(stage, name): tensor
            for stage, module in enumerate(self.modules)
            for name, tensor in dict(tensors(module)).items()
        }

    def key(self, stage: int, name: str) -> str:
        """What a tensor is called here."""
        return f"{stage}: {name}" if self.is_chain else name

    def load(self, values: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for key, value in values.items():
                copy_into(self.tensors[key], value)

    def values(self) -> Values:
        return {key: tensor.detach().clone() for key, tensor in self.tensors.items()}

    def train(self, num_steps: int) -> list[WholeStep]:
        optimizer = self.question.optimizer(self._distinct)
        steps = []
        for number in range(num_steps):
            before = self.values()
            optimizer.zero_grad()
            reports, gradients = self._of_replicas(number)
            for parameter, grad in gradients.items():
                parameter.grad = grad
            optimizer.step()
            of_step = {key: gradients[p] for key, p in self.parameters.items()}
            after = self.values()
            weights, buffers = ({key: after[key] for key in keys} for keys in (self.parameters, self.buffers))
            steps.append(WholeStep(reports, _copied(of_step), weights, buffers, before))
        return steps

    def _of_replicas(self, step: int) -> tuple[list[list[Any]], dict[nn.Parameter, Tensor | None]]:
        """The reports of each replica, and the mean of their gradients."""
        question, reports, gradients, buffers = self.question, [], [], []
        before = {key: buffer.clone() for key, buffer in self.buffers.items()}
        for replica in range(question.num_replicas):
            self.load(before)
            seed(step, replica)
            self._forget()
            reports.append([self.backward(batch) for batch in question.of_replica(replica)])
            gradients.append([None if p.grad is None else p.grad.clone() for p in self._distinct])
            buffers.append({key: buffer.clone() for key, buffer in self.buffers.items()})
        self.load(buffers[0])
        return reports, dict(zip(self._distinct, map(_mean, zip(*gradients))))

    def parts(self, step: WholeStep, number: int) -> list[Gradients]:
        """The part of each microbatch, of all replicas, in the gradients of a step."""
        parts = []
        for replica in range(self.question.num_replicas):
            self.load(step.before)
            seed(number, replica)
            for batch in self.question.of_replica(replica):
                self._forget()
                self.backward(batch)
                share = 1 / self.question.num_replicas
                own = {key: None if p.grad is None else p.grad * share for key, p in self.parameters.items()}
                parts.append(own)
        return parts

    def _forget(self) -> None:
        for parameter in self._distinct:
            parameter.grad = None

    def backward(self, batch: Any) -> Any:
        """Forward of a microbatch and, in training, backward. Returns the report."""
        is_trained = not self.question.options.get("forward_only")
        with torch.set_grad_enabled(is_trained):
            loss, *num_tokens, report = self.forward(batch)
        if num_tokens:
            loss = loss / num_tokens[0]
        if is_trained and isinstance(loss, Tensor) and loss.requires_grad:
            (loss / self.question.num_microbatches).backward()  # type: ignore[no-untyped-call]
        return report

    def forward(self, batch: Any) -> tuple[Any, ...]:
        """What the loss function returns of a microbatch."""
        received: Any = None
        for index, module in enumerate(self.modules):
            if (hand := find_attribute(module, "set_input_tensor")) is not None:
                is_one = index == 0 or isinstance(received, Tensor) or not isinstance(received, (list, tuple, dict))
                hand([received] if is_one else received)
            received, loss_func = self.question.forward(iter([batch]), module)
        found: tuple[Any, ...] = loss_func(received)
        return found


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """The mean of those of all replicas, of which one that has none counts as zeros."""
    there = [grad for grad in gradients if grad is not None]
    return sum(there[1:], there[0]) / len(gradients) if there else None


def _copied(gradients: Gradients) -> Gradients:
    return {key: None if grad is None else grad.clone() for key, grad in gradients.items()}


def seed(step: int, replica: int = 0) -> None:
    """Whatever draws random numbers begins each step alike."""
    torch.default_generator.manual_seed(1000 * step + replica)
