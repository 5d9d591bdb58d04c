"""The whole model of a question: its tensors by name, and what its steps leave behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .names import buffers_of, copy_into, parameters_of, tensors_of
from .question import Question
from .whole import Whole

Values = dict[str, Tensor]
Gradients = dict[str, Tensor | None]


@dataclass
class WholeStep:
    """What one step of the whole model gives.

    Attributes:
        reports: by replica and microbatch.
        gradients: those of the mean over all microbatches of all replicas, or over all of their tokens.
        weights, buffers: after the optimizer's step. Each replica has buffers of its own: these are the first's.
        before: weights and buffers before the step.
        num_tokens: of each microbatch, of all replicas, where loss functions count them.
    """

    reports: list[list[Any]]
    gradients: Gradients
    weights: Values
    buffers: Values
    before: Values
    num_tokens: list[float]


class Reference(Whole):
    """The unpartitioned model, trained in place of the pipeline.

    Args:
        modules: the model; or all of its stages.
        config: that of the pipeline's chunks.
    """

    def __init__(self, question: Question, modules: Sequence[nn.Module], config: Any) -> None:
        lengths = question.options.get("decoder_seq_length"), question.options.get("seq_length")
        super().__init__(modules, question.forward, config, lengths[0] or lengths[1])
        self.question, self.forward_only = question, bool(question.options.get("forward_only"))
        self.is_chain = len(modules) > 1
        self.named: dict[str, nn.Parameter] = self._each(parameters_of)
        self.tensors: Values = self._each(tensors_of)
        self.buffers: Values = self._each(buffers_of)

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
        return _copied(self.tensors)

    def train(self, num_steps: int) -> list[WholeStep]:
        optimizer = self.question.optimizer(self.parameters)
        steps = []
        for number in range(num_steps):
            before = self.values()
            optimizer.zero_grad()
            reports = self._of_replicas(number)
            gradients = {key: None if p.grad is None else p.grad.clone() for key, p in self.named.items()}
            optimizer.step()
            step = WholeStep(reports, gradients, _copied(self.named), _copied(self.buffers), before, [*self.num_tokens])
            steps.append(step)
        return steps

    def _of_replicas(self, step: int) -> list[list[Any]]:
        """The reports of each replica. The mean of their gradients is that of the parameters then."""
        question, before, first = self.question, _copied(self.buffers), Values()
        self.num_tokens.clear()

        def begin(replica: int) -> None:
            if replica == 1:
                first.update(_copied(self.buffers))
            self.load(before)
            seed(step, replica)

        data = [question.of_replica(replica) for replica in range(question.num_replicas)]
        reports = self.step_of_replicas(data, self.forward_only, begin)
        self.load(first)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= self._divisor().to(parameter.grad.dtype)
        return reports

    def _divisor(self) -> Tensor:
        """The number of tokens where gradients are sums over them. They are the mean of all replicas already."""
        is_sum = self.config.calculate_per_token_loss and self.num_tokens
        number = (sum(self.num_tokens) or 1.0) / self.question.num_replicas if is_sum else 1.0
        return torch.tensor(number, dtype=torch.float64)

    def parts(self, step: WholeStep, number: int) -> list[Gradients]:
        """The part of each microbatch, of all replicas, in the gradients of a step."""
        parts: list[Gradients] = []
        self.num_tokens = [*step.num_tokens]
        share = 1 / self._divisor().item() / self.question.num_replicas
        for replica in range(self.question.num_replicas):
            self.load(step.before)
            seed(number, replica)
            for batch in self.question.of_replica(replica):
                self.forget_gradients()
                self.run(batch, self.question.num_microbatches, self.forward_only)
                parts.append({key: None if p.grad is None else p.grad * share for key, p in self.named.items()})
        return parts


def _copied(tensors: Mapping[str, Tensor]) -> Values:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def seed(step: int, replica: int = 0) -> None:
    """Whatever draws random numbers begins each step alike."""
    torch.default_generator.manual_seed(1000 * step + replica)
