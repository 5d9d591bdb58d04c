"""Plain modules as stages: the scripts that one writes without having read how stages talk to each other."""

from functools import partial
from typing import Any

import pytest
import torch
from tools.against import add_gradients, assert_same_gradients, chunks_of, normal, same_as_whole, step, use_groups
from tools.models import seed_cpu
from tools.ranks import on_ranks, start_again
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import megapipe
from megapipe import PipelineStage, StageInfo, distribute_layers

NUM_MICROBATCHES = 5
BATCH, WIDTH = 2, 8

compare = partial(same_as_whole, num_steps=2)


def of_sizes(*sizes: int) -> list[Any]:
    return [(normal(size, WIDTH, seed=k), normal(size, WIDTH, seed=k + 100)) for k, size in enumerate(sizes)]


NUMBERS = of_sizes(*[BATCH] * NUM_MICROBATCHES)


def all_stages(chunks: list[Any]) -> list[nn.Module]:
    num_stages = chunks[0].info.num_stages
    return [mlp(StageInfo(index, num_stages)) for index in range(num_stages)]


def mlp(info: StageInfo) -> nn.Module:
    seed_cpu(info.index)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in distribute_layers(8, info)]
    return nn.Sequential(*layers)


def with_gaps(info: StageInfo) -> nn.Module:
    seed_cpu(info.index)
    layout = {2: [3, 0], 4: [1, 0, 2, 0]}[info.num_stages]
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in distribute_layers(3, info, layout=layout)))


@on_ranks(2)
def test_stages_without_layers(rank: int) -> None:
    compare(with_gaps, ("1f1b", "zbv"), NUMBERS[:3])


@on_ranks(2)
def test_no_activation_is_kept_from_one_step_to_the_next(rank: int) -> None:
    step("zbv", chunks := chunks_of(mlp, "zbv"), NUMBERS)
    assert not any(chunk._received for chunk in chunks)


# Shapes


@on_ranks(2)
def test_microbatches_that_differ_in_the_first_step_may_always(rank: int) -> None:
    chunks = chunks_of(mlp, "zbv")
    for sizes in ((2, 3, 3, 1), (4, 4), (1, 5, 2)):
        for chunk in chunks:
            chunk.zero_grad()
        step("zbv", chunks, of_sizes(*sizes))
        expected = all_stages(chunks)
        add_gradients(expected, of_sizes(*sizes))
        assert_same_gradients(chunks, expected)


@on_ranks(2)
def test_other_shapes_after_the_first_step(rank: int) -> None:
    """They are found anew where they differ by what all ranks know. Otherwise all ranks are told."""
    (chunk,) = chunks_of(mlp, "1f1b", timeout=20.0)
    for _ in range(2):
        step("1f1b", [chunk], of_sizes(4, 4))
        step("1f1b", [chunk], of_sizes(3, 3, 3), forward_only=True)
        step("1f1b", [chunk], of_sizes(2, 2, 2), micro_batch_size=2)
    with pytest.raises((ValueError, megapipe.PipelineError), match=r"stage 0 returned float32.*microbatch 1") as caught:
        step("1f1b", [chunk], of_sizes(4, 3))
    assert "stage 1 expects float32[4, 8]. That was its shape in the first step." in str(caught.value)
    assert "pass another seq_length or micro_batch_size with it" in str(caught.value)


@on_ranks(2)
def test_one_rank_with_new_chunks_is_told(rank: int) -> None:
    """It finds shapes while the other expects those it has found: no rank may wait for a header that nobody sends. The
    error did not say that the chunk was why."""
    (chunk,) = chunks_of(mlp, "1f1b", timeout=20.0)
    step("1f1b", [chunk], of_sizes(4, 4))
    other = PipelineStage(mlp(chunk.info), chunk.info, chunk.config) if rank else chunk
    with pytest.raises(
        ValueError, match=r"stage 0 to stage 1: float32\[4, 8\] on rank 0; .* the first step of a new chunk on rank 1"
    ):
        step("1f1b", [other], of_sizes(4, 4))
    start_again()
    use_groups()
    with pytest.raises(ValueError, match="disagree on seq_length, micro_batch_size and decoder_seq_length"):
        step("1f1b", [other], of_sizes(4, 4), micro_batch_size=4 + rank)
    step("1f1b", [other], of_sizes(4, 4))


# The module in it


def test_names_are_those_of_the_module() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    stage = PipelineStage(module, StageInfo(0, 2))
    assert list(stage.state_dict()) == list(module.state_dict())
    assert [name for name, _ in stage.named_parameters()] == [name for name, _ in module.named_parameters()]
    assert [name for name, _ in stage.named_buffers("a")] == [f"a.{name}" for name, _ in module.named_buffers()]
    assert stage.get_parameter("0.weight") is module[0].weight
    assert get_model_state_dict(stage).keys() == module.state_dict().keys()
    around = nn.ModuleDict({"inner": stage})
    assert list(around.state_dict()) == [f"inner.{name}" for name in module.state_dict()]
    for target in (stage, around):
        saved = {name: torch.full_like(tensor, 3) for name, tensor in target.state_dict().items()}
        nn.init.zeros_(module[0].weight)
        target.load_state_dict(saved)
        assert module[0].weight.eq(3).all()
    with pytest.raises(RuntimeError, match=r'Missing key.* "module.0.weight"'):
        stage.load_state_dict({name: t for name, t in stage.state_dict().items() if name != "0.weight"})
    module[0].register_module("module", nn.Linear(2, 2))
    PipelineStage(module[0], StageInfo(0, 2)).load_state_dict(module[0].state_dict())  # `weight` took another's name
    del module[0].module
    stage.register_buffer("own", torch.ones(1))  # as docs/own_model.md has it for stages without parameters
    stage.load_state_dict(stage.state_dict())


class Graph(nn.Module):
    """A layer with a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("adjacency", torch.eye(4).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.sparse.mm(self.adjacency, x))


def of_another_kind(info: StageInfo) -> nn.Module:
    seed_cpu(info.index)
    return torch.jit.script(nn.Linear(4, 4)) if info.index else Graph()


@on_ranks(2)
def test_modules_of_other_kinds(rank: int) -> None:
    """A sparse buffer has no memory to be told from what moves, and the parts of a scripted module are in no dict."""
    data = [(normal(4, 4, seed=seed), normal(4, 4, seed=9)) for seed in range(3)]
    chunks = chunks_of(of_another_kind, "gpipe", offload_activations=0.01)
    expected = [of_another_kind(StageInfo(index, 2)) for index in range(2)]
    reports, losses = step("gpipe", chunks, data), add_gradients(expected, data)
    assert reports == (losses if rank else [])
    assert_same_gradients(chunks, expected)


def test_what_is_no_stage() -> None:
    with pytest.raises(TypeError, match="takes a module, got a function"):
        PipelineStage(mlp, StageInfo(0, 2))
    with pytest.raises(TypeError, match=r"takes a StageInfo second, .* got 0"):
        PipelineStage(nn.Linear(2, 2), 0)
    with pytest.raises(ValueError, match="stage 1 has received nothing"):
        PipelineStage(nn.Linear(2, 2), StageInfo(1, 2))(torch.ones(2))
