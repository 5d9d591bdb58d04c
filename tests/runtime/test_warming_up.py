"""The warm-up before the first step: it runs what a step runs, and nothing of it remains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest import TestCase, mock

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.against import use_groups
from tools.models import seed_cpu
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import megapipe
from megapipe import PipelineError, PipelineStage, StageInfo, graph, parallel_state, stages_for_rank, weight_grad

BATCH, WIDTH = 6, 8


class Layers(nn.Module):
    """With random numbers of all kinds, statistics, late buffers, and a list of parameters that is not a module's."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        seed_cpu(info.index)
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.num_runs = 0
        self.register_buffer("mean", None)

    def forward(self, x: Tensor) -> Tensor:
        self.num_runs += 1
        self.mean = x.detach().mean() if self.mean is None else 0.9 * self.mean
        if not hasattr(self, "late"):
            self.register_buffer("late", torch.rand(()))
        self.late += 1
        x = x * (self.late + random.random() + numpy.random.rand()) - self.mean
        x = x + self.recurrent(x[:, None])[0][:, 0]
        return F.dropout(self.norm(self.linear(x)), 0.3)


def forward_step(data_iterator: Iterator[Tensor], chunk: nn.Module) -> Any:
    x = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = F.mse_loss(output, x)
        return loss, loss.detach()

    return chunk(x), loss_func


def make_chunks(schedule: str) -> list[PipelineStage]:
    use_groups()
    return [PipelineStage(Layers(info), info) for info in stages_for_rank(schedule)]


@pytest.mark.parametrize("compiler", ["dynamo", "capture"])
@on_ranks(1)
def test_the_first_step_compiles_nothing_more(rank: int, compiler: str) -> None:
    parallel_state.initialize_model_parallel(1)
    compiled: list[str] = []

    def compile_graph(graph: Any, what: Any) -> Any:
        compiled.append(str(what))
        return graph.forward

    info = StageInfo(0, 1)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3))
    if compiler == "capture":
        mock.patch("megapipe.graph.autograd_function.compile_graph", compile_graph).start()
        module: nn.Module = graph.capture(layers, (torch.zeros(BATCH, WIDTH),), compile="inductor")
    else:
        module = torch.compile(layers, backend=compile_graph)
    chunk = PipelineStage(module, info)
    data = torch.randn(3, BATCH, WIDTH)
    for schedule in ("1f1b", "zb1p"):
        step = megapipe.get_forward_backward_func(schedule)
        megapipe.warm_up(step, forward_step, data[0], chunk, 3)
        num_compiled = len(compiled)
        assert num_compiled > 0
        step(forward_step, iter(data), chunk, 3)
        assert len(compiled) == num_compiled
    mock.patch.stopall()


def test_gradients_and_their_hooks_are_left_alone() -> None:
    weight_grad.convert(module := Layers(StageInfo(0, 1)))
    chunk = PipelineStage(module, StageInfo(0, 1))
    called: list[str] = []
    for name, parameter in chunk.named_parameters():
        parameter.register_hook(lambda grad, name=name: called.append(name))
        parameter.register_post_accumulate_grad_hook(lambda parameter, name=name: called.append(name))
    module.linear.weight.grad_added_to_main_grad = False
    module.linear.weight.main_grad = main_grad = torch.ones(WIDTH, WIDTH)
    module.linear.bias.grad = grad = torch.ones(WIDTH)
    before = {name: (id(parameter), parameter._version) for name, parameter in chunk.named_parameters()}
    state = {name: tensor.clone() for name, tensor in chunk.state_dict().items()}  # the norm writes to its statistics
    for schedule in ("1f1b", "zb1p"):
        step = megapipe.get_forward_backward_func(schedule)
        megapipe.warm_up(step, forward_step, torch.randn(BATCH, WIDTH), chunk, 3)

    def fail(*arguments: Any) -> Any:
        forward_step(*arguments)
        raise KeyError("x")

    example, random_state = torch.randn(BATCH, WIDTH), torch.get_rng_state()
    with pytest.raises(KeyError):  # nor does what has failed leave a trace
        megapipe.warm_up(step, fail, example, chunk, 3)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert module.num_runs == 3
    assert chunk.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in chunk.state_dict().items())
    assert not called
    assert module.linear.weight.main_grad is main_grad
    assert module.linear.bias.grad is grad
    assert torch.equal(main_grad, torch.ones(WIDTH, WIDTH))
    assert torch.equal(grad, torch.ones(WIDTH))
    assert not module.linear.weight.grad_added_to_main_grad
    assert {name: (id(parameter), parameter._version) for name, parameter in chunk.named_parameters()} == before


class Beside(nn.Module):
    """It writes to a tensor that is no buffer, and has a buffer that was expanded and one of its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.sums = nn.Linear(WIDTH, WIDTH), [torch.zeros(WIDTH)]
        self.register_buffer("ones", torch.ones(1).expand(WIDTH))
        self.register_buffer("bias", self.linear.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        self.sums[0].add_(x.detach().mean(0))
        return self.linear(x) * self.ones


def test_tensors_that_are_no_buffers() -> None:
    """A sum among attributes was that of the warm-up's random numbers; at a buffer that was expanded it broke off."""
    chunk = PipelineStage(module := Beside(), StageInfo(0, 1))
    versions = [parameter._version for parameter in chunk.parameters()]
    step = megapipe.get_forward_backward_func("1f1b")
    megapipe.warm_up(step, forward_step, torch.randn(BATCH, WIDTH), chunk, 3)
    assert not module.sums[0].any()
    assert [parameter._version for parameter in chunk.parameters()] == versions


class InList(nn.Module):
    """One of its parameters is reached by a list."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.weights = [self.linear.weight]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, *self.weights, self.linear.bias)


def test_what_would_leave_a_trace() -> None:
    """A parameter reached by a list kept the gradient of random numbers, which the first step added to; a lazy module
    failed with an error of torch's."""
    step, example = megapipe.get_forward_backward_func("1f1b"), torch.randn(BATCH, WIDTH)
    for module, message in (
        (InList(), r"leave a gradient in linear\.weight, which stage 0 reaches by another way"),
        (nn.LazyLinear(WIDTH), "stage 0 holds a LazyLinear, whose parameters its first forward makes"),
    ):
        chunk = PipelineStage(module, StageInfo(0, 1))
        with pytest.raises(ValueError, match=message):
            megapipe.warm_up(step, forward_step, example, chunk, 3)
        assert all(parameter.grad is None for parameter in chunk.parameters())


@on_ranks(2)
def test_schedules_without_a_backward(rank: int) -> None:
    parallel_state.initialize_model_parallel(2)
    chunks = make_chunks("inference")
    example = torch.zeros(BATCH, WIDTH)
    with TestCase().assertLogs("megapipe", "INFO") as logs:
        megapipe.warm_up(
            megapipe.get_forward_backward_func("inference"), forward_step, example, chunks, 1, received=example
        )
    assert any("connected for loop with 1 chunk(s)" in text for text in logs.output)
    assert [chunk.module.num_runs for chunk in chunks] == [1]
    dist.barrier()  # no message was waited for: who ended here would close a connection that the other still makes


@on_ranks(2)
def test_messages_that_nobody_has_described(rank: int) -> None:
    chunks, example = make_chunks("1f1b"), torch.zeros(BATCH, WIDTH)
    with pytest.raises((ValueError, PipelineError), match="from stage 0 to stage 1 is not described before the first"):
        megapipe.warm_up(megapipe.get_forward_backward_func("1f1b"), forward_step, example, chunks, 2)


@on_ranks(2)
def test_a_warm_up_on_some_ranks_only(rank: int) -> None:
    chunks, data = make_chunks("1f1b"), torch.zeros(2, BATCH, WIDTH)
    step = megapipe.get_forward_backward_func("1f1b")

    def begin() -> None:
        if rank == 0:
            megapipe.warm_up(step, forward_step, data[0], chunks, 2)
        step(forward_step, iter(data), chunks, 2)

    with pytest.raises(ValueError, match=r"schedule: 1f1b, in megapipe\.warm_up on rank 0; 1f1b on rank 1"):
        begin()


@on_ranks(1)
def test_replicas_that_communicate_by_themselves(rank: int) -> None:
    parallel_state.initialize_model_parallel(1)
    bare, sharded = (PipelineStage(Layers(StageInfo(0, 1)), StageInfo(0, 1)) for _ in range(2))
    fully_shard(sharded, mesh=parallel_state.get_data_parallel_mesh())
    wrapped = nn.parallel.DistributedDataParallel(bare)
    for by, chunk in {"DistributedDataParallel": wrapped, "fully_shard": sharded}.items():
        with pytest.raises(ValueError, match=f"call it before {by}"):
            megapipe.warm_up(megapipe.get_forward_backward_func("1f1b"), forward_step, None, chunk, 1)
