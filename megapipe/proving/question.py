"""What is to be proved, and how one step of it is run."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..chunks import find_attribute
from ..config import PipelineConfig
from ..plan import Plan, Schedule, StageInfo
from ..stages import PipelineStage


class Optimizer(Protocol):
    def step(self) -> Any: ...
    def zero_grad(self) -> Any: ...


class PlainSGD:
    """Gradient descent without anything else: what is wrong with a gradient is as wrong in the weights."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        self.parameters, self.lr = list(parameters), lr

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.sub_(self.lr * parameter.grad)


TrainStep = Callable[[list[Any], Any, Sequence[Any]], Any]


@dataclass(frozen=True)
class Question:
    """The arguments of `prove`, which says what they are."""

    make_stage: Callable[[StageInfo], nn.Module] | None
    forward_step: Callable[..., Any] | None
    data: Sequence[Any]
    schedule: Any
    whole: Callable[[], nn.Module] | nn.Module | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    train_step: TrainStep | None = None
    optimizer: Callable[[list[nn.Parameter]], Optimizer] = PlainSGD
    num_chunks: int | None = None
    pp_size: int | None = None
    num_replicas: int = 1
    num_steps: int = 2
    tolerance: float = 0.0
    name_of: Callable[[str, StageInfo], str] | None = None
    config: PipelineConfig | None = None
    options: dict[str, Any] = field(default_factory=dict)
    timeout: float = 60.0
    is_local: bool = False
    """Ranks are processes that this one has forked, and is told by what has failed."""

    @property
    def num_microbatches(self) -> int:
        """That of one replica."""
        return len(self.data) // self.num_replicas

    def of_replica(self, replica: int) -> Sequence[Any]:
        """Its microbatches."""
        return self.data[replica * self.num_microbatches : (replica + 1) * self.num_microbatches]

    def forward(self, data_iterator: Any, chunk: nn.Module) -> Any:
        """The caller's forward step, or one made of `loss`."""
        if self.forward_step is not None:
            return self.forward_step(data_iterator, chunk)
        *batch, target = next(data_iterator)
        assert self.loss is not None

        def loss_func(output: Any) -> tuple[Tensor, Tensor]:
            loss = self.loss(output, target)  # type: ignore[misc]
            return loss, loss.detach()

        return chunk(*batch), loss_func

    def stage(self, info: StageInfo, config: PipelineConfig) -> nn.Module:
        """The caller's. A module that knows nothing of pipelines becomes a PipelineStage."""
        assert self.make_stage is not None
        made = self.make_stage(info)
        if find_attribute(made, "set_input_tensor") is None:
            return PipelineStage(made, info, config)
        if self.config is not None:
            raise ValueError(
                f"stage {info.index} has a config of its own, so that config= has none to be for: set it there."
            )
        return made

    @property
    def is_of_megapipe(self) -> bool:
        """Whether the schedule is one of ours, or of our form, and not a function like Megatron's."""
        return isinstance(self.schedule, (str, os.PathLike, Plan, Schedule))


def check_question(question: Question) -> None:
    """Raises ValueError or TypeError for what cannot be proved."""
    if not question.data:
        raise ValueError("data has the microbatches of one step, of all replicas, and is empty: give at least one.")
    if len(question.data) % question.num_replicas:
        raise ValueError(
            f"{len(question.data)} microbatches are no multiple of {question.num_replicas} replicas: give each as many."
        )
    if question.forward_step is None and question.loss is None and question.train_step is None:
        raise ValueError("give forward_step, or loss(output, target) where a microbatch is (*inputs, target).")
    if question.num_steps < 1:
        raise ValueError(f"num_steps is at least 1, got {question.num_steps}.")


def takes_nothing(function: Any) -> bool:
    """Whether it can be called without arguments, as a function that makes something can."""
    if isinstance(function, nn.Module) or not callable(function):
        return False
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):
        return False
    return True


def make(what: Any) -> Any:
    """What a function without arguments makes; anything else is there already."""
    return what() if takes_nothing(what) else what
