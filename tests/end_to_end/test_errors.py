"""Every mistake in docs/errors.md says, on every rank, the sentence that stands there."""

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.ranks import RankPool, start_again
from torch import Tensor, nn
from torch.utils.data import DataLoader

import megapipe
from megapipe import PipelineConfig, PipelineStage, get_forward_backward_func, parallel_state, stages_for_rank

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"
H = 8


class Layers(nn.Module):
    """Megatron's protocol."""

    def __init__(self, keep: Callable[[list[Any]], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)
        self.config = SimpleNamespace(hidden_size=H, timeout=8.0)
        self._keep = keep

    def set_input_tensor(self, received: list[Any]) -> None:
        self.received = self._keep(received)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x if self.received is None else self.received)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(H, H)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x


class Returning(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def linear() -> nn.Module:
    return nn.Linear(H, H)


def bilinear() -> nn.Module:
    return nn.Bilinear(H, H, H)


def stage(info: megapipe.StageInfo, module: nn.Module | None = None, **config: Any) -> PipelineStage:
    return PipelineStage(nn.Linear(H, H) if module is None else module, info, PipelineConfig(timeout=8.0, **config))


def stages(schedule: str = "1f1b", **config: Any) -> list[nn.Module]:
    return [stage(info, **config) for info in stages_for_rank(schedule)]


def data(num_batches: int = 4) -> Iterator[Tensor]:
    return iter(torch.randn(num_batches, 3, H))


def mean(output: Tensor) -> Any:
    return output.mean(), {"loss": output.detach().mean()}


def forward_step(iterator: Any, model: nn.Module) -> Any:
    return model(next(iterator)), mean


def train(
    schedule: str = "1f1b",
    model: Any = None,
    forward_step: Callable[..., Any] = forward_step,
    data_iterator: Any = None,
    num_microbatches: Any = 2,
    **options: Any,
) -> None:
    model = stages(schedule) if model is None else model
    data_iterator = data() if data_iterator is None else data_iterator
    get_forward_backward_func(schedule)(forward_step, data_iterator, model, num_microbatches, **options)


def with_loss(loss_func: Any) -> None:
    train(forward_step=lambda iterator, model: (model(next(iterator)), loss_func))


def of_modules(*modules: Callable[[], nn.Module], **options: Any) -> None:
    train(model=[stage(info, modules[info.index]()) for info in stages_for_rank("1f1b")], **options)


def without_groups(function: Callable[[], object]) -> None:
    parallel_state.destroy_model_parallel()
    try:
        function()
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)


def counts_outside() -> None:
    calls, weight = itertools.count(), nn.Parameter(torch.ones(H))
    module = Returning(lambda x: x * weight + next(calls))
    train(model=[stage(info, module, recompute="all") for info in stages_for_rank("1f1b")], num_microbatches=4)


def fails_on_rank_0() -> None:
    def forward_step(iterator: Any, model: nn.Module) -> Any:
        if dist.get_rank() == 0:
            raise KeyError("sample 17")
        return model(next(iterator)), mean

    train(forward_step=forward_step)


MISTAKES: dict[str, Callable[[], object]] = {
    # Setting up
    "stages_for_rank before initialize_model_parallel": lambda: without_groups(lambda: stages_for_rank("1f1b")),
    "initialize_model_parallel twice": lambda: parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2),
    "3 stages on 2 ranks": lambda: without_groups(
        lambda: parallel_state.initialize_model_parallel(pipeline_model_parallel_size=3)
    ),
    "ranks with different pipeline sizes": lambda: without_groups(
        lambda: parallel_state.initialize_model_parallel(1 + dist.get_rank())
    ),
    "a schedule's name nearly right": lambda: get_forward_backward_func("zb-v"),
    "more stages than layers": lambda: megapipe.distribute_layers(1, stages_for_rank("1f1b")[0]),
    "distribute_layers with a number for the stage": lambda: megapipe.distribute_layers(4, 2),
    "a negative time limit": lambda: train(
        model=[PipelineStage(nn.Linear(H, H), info, PipelineConfig(timeout=-1)) for info in stages_for_rank("1f1b")]
    ),
    "PipelineStage with the number of a stage": lambda: PipelineStage(nn.Linear(H, H), 0),
    # The call
    "a tensor as data_iterator": lambda: train(data_iterator=torch.randn(2, 3, H)),
    "a DataLoader as data_iterator": lambda: train(data_iterator=DataLoader(torch.randn(6, H), batch_size=3)),
    "a list of microbatches as data_iterator": lambda: train(data_iterator=[torch.randn(3, H) for _ in range(4)]),
    "fewer batches than microbatches": lambda: train(num_microbatches=6),
    "an argument's name nearly right": lambda: get_forward_backward_func("1f1b")(
        forward_step, data(), stages(), num_microbatch=2
    ),
    "no microbatch": lambda: train(num_microbatches=0),
    "one chunk where the schedule runs two": lambda: train("zbv", model=stages("zbv")[:1]),
    "chunks made for another schedule": lambda: train("zbv", model=stages("interleaved_1f1b")),
    "a dict of chunks": lambda: train(model=dict(enumerate(stages()))),
    "a plain module behind the first stage": lambda: train(model=nn.Linear(H, H)),
    "1f1b with slices": lambda: train(model=stages(num_sequence_slices=2)),
    "max_in_flight below the schedule's need": lambda: train(model=stages(max_in_flight=1)),
    "a schedule called within a step of it": lambda: train(forward_step=lambda iterator, model: train()),
    # The model and the loss
    "forward_step_func returns the output alone": lambda: train(
        forward_step=lambda iterator, model: model(next(iterator))
    ),
    "forward_step_func returns the loss instead of a function": lambda: train(
        forward_step=lambda iterator, model: (output := model(next(iterator)), output.mean())
    ),
    "the loss function returns the loss alone": lambda: with_loss(lambda output: output.mean()),
    "a loss that is not a scalar": lambda: with_loss(lambda output: (output, {})),
    "a loss that is a float": lambda: with_loss(lambda output: (output.mean().item(), {})),
    "a detached loss": lambda: with_loss(lambda output: (output.mean().detach(), {})),
    "set_input_tensor keeps the list": lambda: train(
        model=Layers(lambda received: received), seq_length=3, micro_batch_size=1
    ),
    "a keyword that the module of a stage does not take": lambda: of_modules(
        Scaled, linear, forward_step=lambda iterator, model: (model(next(iterator), scale=2.0), mean)
    ),
    "a module that takes two arguments by position, behind the first stage": lambda: of_modules(
        bilinear, bilinear, forward_step=lambda iterator, model: (model(*2 * (next(iterator),)), mean)
    ),
    "a stage changes its input in place": lambda: of_modules(linear, InPlace),
    "a recomputed stage that counts its calls outside of itself": counts_outside,
    "an output that cannot be sent": lambda: of_modules(lambda: Returning(lambda x: SimpleNamespace(x=x)), linear),
    "a stage that returns nothing": lambda: of_modules(lambda: Returning(lambda x: None), linear),
    "a text of 1200 letters in a message": lambda: of_modules(
        lambda: Returning(lambda x: {"x": x, "text": "." * 1200}), linear
    ),
    # Ranks that differ or fail
    "another number of microbatches on one rank": lambda: train(num_microbatches=2 + dist.get_rank()),
    "another schedule on one rank": lambda: train("gpipe" if dist.get_rank() else "1f1b"),
    "an error of your own on rank 0": fails_on_rank_0,
}
"""By their texts on the page, without the signs of code."""


def told(function: Callable[[], object]) -> list[str]:
    """What a mistake says on this rank: the warnings, and the error."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", megapipe.TrainingWarning)
        try:
            function()
        except Exception as error:
            return [f"{type(error).__name__}: {error}"]
    return [f"{w.category.__name__}: {w.message}" for w in caught if issubclass(w.category, megapipe.TrainingWarning)]


def all_told(rank: int) -> list[list[str]]:
    sentences = []
    for function in MISTAKES.values():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
        sentences.append(told(function))
        dist.barrier()
        start_again()
    return sentences


def test_every_mistake_says_what_the_page_has(ranks: RankPool) -> None:
    rows = re.findall(r"^\| (.+) \| `(.+)` \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert [cell.replace("`", "") for cell, _ in rows] == list(MISTAKES)
    for (name, sentence), *told in zip(rows, *ranks.run(2, all_told)):
        wanted = re.escape(sentence).replace(re.escape("..."), ".+")
        (first, *others) = sorted((text for texts in told for text in texts), key=len)
        assert re.fullmatch(wanted, first, flags=re.DOTALL), f"{name}: {first}"
        for other in others:  # the ranks that did nothing wrong name the one that did
            assert re.fullmatch(rf"(PipelineError: rank \d failed at .+: )?{wanted}", other, re.DOTALL)
        is_warning = "Warning: " in sentence
        assert is_warning or all(told), f"{name}: a rank went on"


def test_without_a_process_group() -> None:
    (sentence,) = re.findall(r"^RuntimeError: (torch\.distributed is not.+)$", PAGE.read_text(), flags=re.MULTILINE)
    with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
