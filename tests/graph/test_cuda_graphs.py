"""Captured stages as CUDA graphs, on the asynchronous device: a replay writes to the memory of its recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from tools import against
from tools.against import Received, assert_same_gradients, use_groups
from tools.device import needs_devices, on_lazy_device
from tools.device import ranks as ranks
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineConfig, StageInfo, stages_for_rank
from megapipe.graph import capture
from megapipe.plan import make_plan

pytestmark = needs_devices

LENGTH, WIDTH, MICROBATCHES = 3, 4, 6


class Stage(Received):
    """Whole numbers and float64: every sum is exact, in whatever order it is added up."""

    def __init__(self, config: PipelineConfig, info: StageInfo) -> None:
        super().__init__(info)
        self.config = config
        generator = torch.Generator().manual_seed(info.index)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.info.is_first else self.input_tensor
        self.num_calls.add_(1)
        y = x + self.second(torch.relu(self.first(x))) * 0.5
        return y.sum() if self.info.is_last else y  # the loss is also what is reported


def build(schedule: str, pp_size: int, **config: Any) -> list[Stage]:
    use_groups(pp_size)
    sizes = {"hidden_size": WIDTH, "pipeline_dtype": torch.float64, "p2p_transport": "nccl"}
    return [Stage(PipelineConfig(**sizes, **config), info) for info in stages_for_rank(schedule)]


@contextlib.contextmanager
def traced_on_cpu() -> Iterator[None]:
    """The tracer knows no such device."""
    trace = megapipe.graph.trace_joint

    def trace_on_cpu(function: Any, inputs: list[Tensor], name: str) -> Any:
        on_cpu = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype) for t in inputs]
        return trace(function, [mine.requires_grad_(t.requires_grad) for mine, t in zip(on_cpu, inputs)], name)

    with mock.patch("megapipe.graph.captured.trace_joint", trace_on_cpu):
        yield


def step(schedule: str, chunks: list[Stage], place: Any, number: int, **options: Any) -> Any:
    generator = torch.Generator().manual_seed(number)
    inputs = [torch.randint(-1, 2, (LENGTH, 1, WIDTH), generator=generator).double() for _ in range(MICROBATCHES)]
    data = [(place(x), None) for x in inputs]
    sizes = {"seq_length": LENGTH, "micro_batch_size": 1}
    return against.step(schedule, chunks, data, lambda loss, _: loss, **sizes, **options)


def train(schedule: str, chunks: list[Stage], place: Any) -> Iterator[Any]:
    """Weights change between steps, and in the end lie elsewhere; a validation comes between the last two."""
    for number in range(5):
        yield step(schedule, chunks, place, number, forward_only=number == 3)
        for chunk in chunks:
            if number == 3:
                bias, gradient = chunk.second.bias, chunk.second.bias.grad
                chunk.second.bias = nn.Parameter(bias.detach().clone())
                chunk.second.bias.grad = gradient
            for parameter in chunk.parameters():
                with torch.no_grad():
                    parameter.sub_(torch.sign(parameter.grad))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zb2p", "zbv", "v_half"])
@on_ranks(2)
def test_replays_give_the_gradients_of_the_whole_model(rank: int, schedule: str) -> None:
    """Each unit in flight keeps what its backward needs, although replays write to the same memory again."""
    expected = build(schedule, 2)
    losses = list(train(schedule, expected, lambda x: x))
    chunks = build(schedule, 2, cuda_graphs=True)
    with on_lazy_device(chunks) as lazy, traced_on_cpu():
        before = lazy.cuda.NUM_GRAPHS
        example = lazy.device.to_device(torch.zeros(LENGTH, 1, WIDTH, dtype=torch.float64))
        for chunk in chunks:
            capture(chunk, (example,), input_tensor=None if chunk.info.is_first else example)
        got, graphs = [], []
        for reports in train(schedule, chunks, lazy.device.to_device):
            got.append([lazy.device.to_host(one) for one in reports])
            graphs.append(lazy.cuda.NUM_GRAPHS - before)
        assert got == losses
        in_flight = make_plan(schedule, 2, MICROBATCHES).peak_in_flight(rank)
        assert graphs[2] == graphs[1] >= 2 * in_flight  # one for F and one for B, at least, and then no more
        for mine, theirs in zip(chunks, expected, strict=True):
            gradients = {name: lazy.device.to_host(p.grad) for name, p in mine.named_parameters()}
            assert_same_gradients([theirs], gradients, schedule)
            assert lazy.device.to_host(mine.num_calls) == theirs.num_calls


@pytest.mark.parametrize(
    ("is_captured", "config", "text"),
    [
        (False, {}, "takes captured stages, but stage 0 .* is not: call megapipe.graph.capture on it"),
        (True, {"recompute": "all"}, r"config.recompute would free nothing: capture\(recompute=True\)"),
    ],
)
@on_ranks(1)
def test_what_cannot_be_recorded(rank: int, is_captured: bool, config: dict[str, Any], text: str) -> None:
    chunks = build("1f1b", 1, cuda_graphs=True, **config)
    with pytest.raises(ValueError, match="is for stages on CUDA, but the model is on cpu"):
        step("1f1b", chunks, lambda x: x, 0)
    with on_lazy_device(chunks) as lazy, traced_on_cpu():
        if is_captured:
            capture(chunks[0], (lazy.device.to_device(torch.zeros(LENGTH, 1, WIDTH, dtype=torch.float64)),))
        with pytest.raises(ValueError, match=text):
            step("1f1b", chunks, lazy.device.to_device, 0)
