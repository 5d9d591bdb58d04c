"""A step of a pipeline against the same stages without one: losses and gradients to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, PipelineStage, StageInfo, parallel_state, stages_for_rank
from megapipe.overlap import in_segments
from megapipe.proving.compare import difference
from megapipe.proving.names import full
from megapipe.proving.whole import Whole

Make = Callable[[StageInfo], nn.Module]
Loss = Callable[[Any, Any], Tensor]


class Received(nn.Module):
    """A stage of Megatron's protocol. What the stage before has sent is its attribute `input_tensor`."""

    def __init__(self, info: StageInfo, **config: Any) -> None:
        super().__init__()
        self.info = info
        self.config = SimpleNamespace(**config)
        self.input_tensor: Any = None

    def set_input_tensor(self, received: Any) -> None:
        self.input_tensor = received[0] if type(received) is list and len(received) == 1 else received


def use_groups(pp_size: int | None = None) -> None:
    """Process groups, unless there are some: of a pipeline of all ranks, or of `pp_size`."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pp_size or dist.get_world_size())


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    if target.is_floating_point():
        return F.mse_loss(output, target)
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def mean_square(output: Tensor, target: None = None) -> Tensor:
    return output.float().square().mean()


def chunks_of(make: Make, schedule: str, pp_size: int | None = None, **config: Any) -> list[Any]:
    """This rank's stages. A module that knows nothing of pipelines becomes a PipelineStage."""
    use_groups(pp_size)
    shared = PipelineConfig(**config)
    modules = [(make(info), info) for info in stages_for_rank(schedule)]
    return [one if hasattr(one, "set_input_tensor") else PipelineStage(one, info, shared) for one, info in modules]


def unlabelled(inputs: Iterable[Any]) -> list[tuple[Any, None]]:
    """Microbatches whose loss is one of the output alone."""
    return [(x, None) for x in inputs]


def forward_step_of(loss_func: Loss, in_parts: bool = False, **keywords: Any) -> Callable[..., Any]:
    """The report of a microbatch is its loss.

    Args:
        loss_func: compares the output with what a microbatch has last.
        in_parts: forwards are given in segments.
        keywords: the forwards are called with.
    """

    def forward_step(data_iterator: Iterator[Any], chunk: nn.Module) -> Any:
        *batch, target = next(data_iterator)
        output = (in_segments if in_parts else nn.Module.__call__)(chunk, *batch, **keywords)
        return output, lambda output: ((loss := loss_func(output, target)), loss.detach())

    return forward_step


def step(
    schedule: Any,
    chunks: Any,
    data: Sequence[Any],
    loss_func: Loss = loss_of,
    keywords: dict[str, Any] | None = None,
    in_parts: bool = False,
    **options: Any,
) -> list[Any]:
    """One step, as `forward_step_of` has it."""
    forward_step = forward_step_of(loss_func, in_parts, **(keywords or {}))
    arguments = {"forward_step_func": forward_step, "data_iterator": iter(data), "num_microbatches": len(data)}
    function = schedule if callable(schedule) else megapipe.get_forward_backward_func(schedule)
    return function(model=chunks, **{**arguments, **options})


def add_gradients(
    stages: Sequence[nn.Module], data: Sequence[Any], loss_func: Loss = loss_of, **keywords: Any
) -> list[Tensor]:
    """One step without a pipeline. Returns the losses; gradients are added to those that are there."""
    wrapped = [PipelineStage(module, StageInfo(index, len(stages))) for index, module in enumerate(stages)]
    modules = [one.module if hasattr(one.module, "set_input_tensor") else one for one in wrapped]
    return Whole(modules, forward_step_of(loss_func, **keywords)).step(data, not torch.is_grad_enabled())


def same_as_whole(
    make: Make,
    schedules: Iterable[str],
    data: Sequence[Any],
    loss_func: Loss = loss_of,
    num_steps: int = 1,
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Some steps of each schedule are proved against all stages one after the other.

    Args:
        num_steps: a second one begins with the shapes that the first has found.
        options: of the schedule.
    """

    forward_step = forward_step_of(loss_func, **(keywords or {}))
    for schedule in schedules:
        proof = megapipe.prove(make, forward_step, data=data, schedule=schedule, num_steps=num_steps, options=options)
        assert proof, proof


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}


def assert_same_gradients(
    chunks: Iterable[nn.Module],
    expected: nn.Module | dict[str, Tensor | None] | Sequence[nn.Module],
    what: Any = "",
    atol: float = 0.0,
) -> None:
    """Bit for bit, or within `atol`. Where none is expected, there must be none.

    Args:
        expected: the whole model, whose parameters have the chunks' names; or gradients by such names; or all stages.
    """
    for chunk in chunks:
        wanted = expected[chunk.info.index] if isinstance(expected, Sequence) else expected  # type: ignore[union-attr]
        by_name = gradients(wanted) if isinstance(wanted, nn.Module) else wanted
        for name, parameter in (chunk.module if isinstance(chunk, PipelineStage) else chunk).named_parameters():
            assert_close(parameter.grad, by_name[name], atol, f"{what} {name}")


def assert_close(found: Tensor | None, expected: Tensor | None, atol: float, what: str) -> None:
    """Both are there or none, in one dtype, and numbers."""
    kinds = [getattr(one, "dtype", None) for one in (found, expected)]
    assert kinds[0] == kinds[1], f"{what}: {kinds[0]} and not {kinds[1]}"
    if found is not None and expected is not None:
        differs = difference(full(found), full(expected), atol, of=1.0)
        assert differs is None, f"{what}: {differs}"
        assert not full(found).isnan().any(), f"{what}: no number"


def assert_same_losses(reports: list[Any], expected: list[Tensor], chunks: Iterable[Any]) -> None:
    """On the rank of the last stage, in microbatch order."""
    if any(getattr(chunk, "info", getattr(chunk, "stage", None)).is_last for chunk in chunks):
        assert [report["loss"] for report in reports] == expected
    else:
        assert reports == []
