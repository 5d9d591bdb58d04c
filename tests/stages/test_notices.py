"""What a first step warns of: it succeeds, but perhaps trains other things than was meant."""

import warnings
from typing import Any

import torch
from tools import against
from tools.models import build, run, seed_cpu
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineStage, StageInfo, TrainingWarning, parallel_state, stages_for_rank


class Forgetful(nn.Module):
    """Has layers that it does not use."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.used = nn.Linear(4, 4)
        self.unused = nn.ModuleList(nn.Linear(4, 4) for _ in range(info.index * 2))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).tanh()


def step(schedule: str, chunks: list[Any], **options: Any) -> None:
    against.step(schedule, chunks, [(torch.randn(2, 4), None)] * 4, lambda output, _: output.sum(), **options)


@on_ranks(2)
def test_unused_parameters_and_empty_ws_are_named_once(rank: int) -> None:
    for schedule in ("1f1b", "zb1p"):
        chunks = against.chunks_of(Forgetful, schedule)
        step(schedule, chunks, forward_only=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step(schedule, chunks)
            step(schedule, chunks)
        said = [f"{one.category.__name__}: {one.message}" for one in caught]
        if rank == 1:
            (unused,) = said
            assert unused.startswith("NoGradientWarning: unused.0.weight, unused.0.bias, unused.1.weight and 1 more")
            assert "of stage 1 got no gradient in a whole step" in unused
        else:
            unsplit = "UnsplitBackwardWarning: zb1p splits backwards, but no layer of any stage leaves its weight"
            assert [text.startswith(unsplit) for text in said] == [True] * (schedule == "zb1p")


@on_ranks(2)
def test_a_pipeline_warns_once_and_of_the_callers_line(rank: int) -> None:
    """zbv on 4 ranks printed eight warnings, one for each stage, and each pointed at a line of megapipe's own; then
    four, one for each rank. What only the last rank has is said by the first, and what only the first has."""
    for stages, named in (((1, 2), "1 or 2"), ((0, 3), "0 or 3")):
        chunks = against.chunks_of(Forgetful, "zbv")
        for chunk in chunks:
            if chunk.info.index not in stages:
                megapipe.weight_grad.convert(chunk)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            step("zbv", chunks)
        assert all(one.filename == against.__file__ for one in caught)
        said = [str(one.message) for one in caught if one.category is megapipe.UnsplitBackwardWarning]
        assert [f"no layer of stage {named} leaves" in text for text in said] == [True] * (rank == 0)


@on_ranks(2)
def test_what_is_as_it_should_be_is_silent(rank: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for schedule, recompute in (("interleaved_1f1b", True), ("zb1p", False), ("zbv", True), ("dualpipev", False)):
            chunks = build(schedule, 2, 4, deferred=True, recompute=recompute)
            run(schedule, chunks, 4)
            run(schedule, chunks, 4, forward_only=True)


@on_ranks(2)
def test_gradients_that_somebody_takes_are_not_missing(rank: int) -> None:
    """A hook that steps at once leaves no gradient; main_grad is where Megatron has it."""
    parallel_state.initialize_model_parallel(2)
    (info,) = stages_for_rank("1f1b")
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in module[0].parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for parameter in module[1].parameters():
        parameter.main_grad = torch.zeros_like(parameter)
        parameter.register_hook(lambda grad: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step("1f1b", [PipelineStage(module, info)])


@on_ranks(2)
def test_all_are_silenced_in_one_place(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    (info,) = stages_for_rank("zb1p")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=TrainingWarning)
        step("zb1p", [PipelineStage(Forgetful(info), info)])
