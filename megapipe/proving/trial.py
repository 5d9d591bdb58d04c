"""The caller's pipeline on this rank: its chunks, and what its steps leave behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .. import parallel_state
from ..calling import get_forward_backward_func
from ..chunks import find_attribute
from ..config import PipelineConfig
from ..plan import StageInfo, loop
from ..runtime import stages_for_rank
from ..timing import LiveStorages
from ..training import GradientReducer, divide_by_num_tokens
from .names import Place, buffers_of, copy_into, full, gradient_of, parameters_of, tensors_of
from .question import Question, make
from .reference import seed
from .torchs import is_torchs, step_of_torchs


@dataclass
class StepResult:
    """What one step leaves behind on a rank: of each tensor a copy, by stage and name.

    Attributes:
        reports: what the step has returned; None where that is nothing that is known.
        weights, buffers: after the optimizer's step.
        held: the most bytes at once of what was made in the step.
    """

    reports: list[Any] | None
    gradients: dict[Place, Tensor | None]
    weights: dict[Place, Tensor]
    buffers: dict[Place, Tensor]
    held: int = 0


@dataclass
class Evidence:
    """What a rank has to say."""

    rank: int
    replica: int
    stages: list[int]
    steps: list[StepResult] = field(default_factory=list)


class Trial:
    """The chunks of this rank, and the steps that they are trained with."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.schedule = question.schedule if question.is_of_megapipe else make(question.schedule)
        if is_torchs(self.schedule):
            self._step, self.chunks, self.infos = step_of_torchs(self.schedule, question)
        else:
            self.infos = self._stages()
            self.chunks = self._make_chunks()
            self._step = self._call_schedule
        self.num_stages = self.infos[0].num_stages

    def _stages(self) -> list[StageInfo]:
        question = self.question
        if question.is_of_megapipe and not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(question.pp_size or dist.get_world_size() // question.num_replicas)
        if question.is_of_megapipe:
            return stages_for_rank(question.schedule, num_chunks=question.num_chunks)
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        num_chunks = question.num_chunks or parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        return loop.stages(parallel_state.get_pipeline_model_parallel_rank(), pp_size, num_chunks)

    def _make_chunks(self) -> list[nn.Module]:
        question, config = self.question, replace(self.question.config or PipelineConfig())
        if question.make_stage is None:
            from .cutting import cut_model

            chunks = cut_model(question, config)
        else:
            chunks = [question.stage(info, config) for info in self.infos]
        if question.train_step is None:
            self._finalize(chunks)
        return chunks

    def _finalize(self, chunks: list[nn.Module]) -> None:
        """What a trainer does: gradients are averaged over replicas, and divided by tokens where they are sums."""
        settings = [find_attribute(chunk, "config") for chunk in chunks]
        finish: Any = None
        if self.question.num_replicas > 1:
            finish = GradientReducer(chunks).finish
        elif getattr(settings[0], "calculate_per_token_loss", False):
            finish = divide_by_num_tokens
        for one in settings if finish is not None else []:
            if getattr(one, "finalize_model_grads_func", None) is None:
                one.finalize_model_grads_func = finish

    @property
    def config(self) -> Any:
        """The settings of all chunks; None where they have none."""
        return find_attribute(self.chunks[0], "config")

    def places(self, tensors: Callable[[nn.Module], Any] = tensors_of) -> dict[Place, Any]:
        """All tensors of this rank's stages."""
        return {
            (info.index, name): tensor
            for info, chunk in zip(self.infos, self.chunks)
            for name, tensor in dict(tensors(chunk)).items()
        }

    def load(self, values: Mapping[Place, Tensor]) -> None:
        """Raises ValueError for a tensor of another shape than in the whole model."""
        with torch.no_grad():
            for place, tensor in self.places().items():
                try:
                    copy_into(tensor, values[place])
                except ValueError as error:
                    raise ValueError(f"{place[1]} of stage {place[0]} is not as in the whole model: {error}.") from None

    def train(self, num_steps: int, watches_memory: bool = False) -> Evidence:
        question = self.question
        replica = parallel_state.get_data_parallel_rank() if parallel_state.model_parallel_is_initialized() else 0
        parameters = list(dict.fromkeys(p for chunk in self.chunks for _, p in parameters_of(chunk)))
        optimizer = question.optimizer(parameters)
        found = Evidence(dist.get_rank(), replica, [info.index for info in self.infos])
        for number in range(num_steps):
            gradients = before_update(optimizer, self.gradients)
            seed(number, replica)
            memory = LiveStorages() if watches_memory else None
            with memory or nullcontext():
                returned = self._run(optimizer, question.of_replica(replica))
            reports = [*map(_plain, returned)] if isinstance(returned, (list, tuple)) else None
            weights, buffers = (
                {of: full(tensor) for of, tensor in self.places(kind).items()} for kind in (parameters_of, buffers_of)
            )
            held = 0 if memory is None else memory.peak
            found.steps.append(StepResult(reports, gradients or self.gradients(), weights, buffers, held))
        return found

    def gradients(self) -> dict[Place, Tensor | None]:
        places = self.places(parameters_of)
        grads = {place: gradient_of(parameter) for place, parameter in places.items()}
        return {place: None if grad is None else full(grad) for place, grad in grads.items()}

    def _run(self, optimizer: Any, microbatches: Sequence[Any]) -> Any:
        if self.question.train_step is not None:
            return self.question.train_step(self.chunks, optimizer, microbatches)
        optimizer.zero_grad()
        returned = self._step(microbatches)
        optimizer.step()
        return returned

    def _call_schedule(self, microbatches: Sequence[Any]) -> Any:
        question, is_alone = self.question, len(self.chunks) == 1
        function = get_forward_backward_func(self.schedule) if question.is_of_megapipe else self.schedule
        return function(
            forward_step_func=question.forward,
            data_iterator=iter(microbatches) if is_alone else [iter(microbatches) for _ in self.chunks],
            model=self.chunks[0] if is_alone else self.chunks,
            num_microbatches=len(microbatches),
            **question.options,
        )


def before_update(optimizer: Any, look: Callable[[], dict[Place, Tensor | None]]) -> dict[Place, Tensor | None]:
    """Keep what `look` gives right before the next step of an optimizer, behind which gradients may be gone. It is in
    the result then, which is empty before."""
    found: dict[Place, Tensor | None] = {}
    own = optimizer.step

    def step(*args: Any, **keywords: Any) -> Any:
        optimizer.step = own
        found.update(look())
        return own(*args, **keywords)

    optimizer.step = step
    return found


def _plain(report: Any) -> Any:
    """A report that can be sent and kept."""
    return tree_map(lambda one: full(one) if isinstance(one, Tensor) else one, report)
