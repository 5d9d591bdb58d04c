"""Captured stages as CUDA graphs, on the asynchronous device: a replay writes to the memory of its recording."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
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
from megapipe import PipelineConfig, PipelineStage, StageInfo, stages_for_rank
from megapipe.graph import capture
from megapipe.plan import make_plan
from megapipe.weight_grad import convert

pytestmark = needs_devices

LENGTH, WIDTH, MICROBATCHES = 3, 4, 6


class Layers(nn.Module):
    """Whole numbers and float64: every sum is exact, in whatever order it is added up."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info = info
        generator = torch.Generator().manual_seed(info.index)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.float64))
        for parameter in self.parameters():
            parameter.data.copy_(torch.randint(-1, 2, parameter.shape, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls.add_(1)
        y = x + self.second(torch.relu(self.first(x))) * 0.5
        return y.sum() if self.info.is_last else y  # the loss is also what is reported


class Stage(Received):
    """One of Megatron's protocol."""

    def __init__(self, config: PipelineConfig, info: StageInfo) -> None:
        super().__init__(info)
        self.config = config
        self.layers = Layers(info)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x if self.info.is_first else self.input_tensor)


def build(schedule: str, pp_size: int, is_wrapped: bool = False, **config: Any) -> list[Any]:
    """
    Args:
        is_wrapped: a stage is the layers in a PipelineStage.
    """
    use_groups(pp_size)
    sizes = {"hidden_size": WIDTH, "pipeline_dtype": torch.float64, "p2p_transport": "nccl"}
    shared = PipelineConfig(**sizes, **config)
    stages = stages_for_rank(schedule)
    return [PipelineStage(Layers(info), info, shared) if is_wrapped else Stage(shared, info) for info in stages]


def layers_of(chunk: nn.Module) -> Layers:
    return next(module for module in chunk.modules() if isinstance(module, Layers))


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


def train(schedule: str, chunks: list[Any], place: Any) -> Iterator[Any]:
    """Weights change between steps, and in the end lie elsewhere; a validation comes between the last two."""
    for number in range(5):
        yield step(schedule, chunks, place, number, forward_only=number == 3)
        for layers in map(layers_of, chunks):
            if number == 3:
                bias, gradient = layers.second.bias, layers.second.bias.grad
                layers.second.bias = nn.Parameter(bias.detach().clone())
                layers.second.bias.grad = gradient
            for parameter in layers.parameters():
                with torch.no_grad():
                    parameter.sub_(torch.sign(parameter.grad))
                if number == 1:
                    parameter.grad = None


def hook(chunks: list[Any], is_wanted: bool) -> None:
    """What a hook returns takes the place of the gradient."""
    for layers in map(layers_of, chunks if is_wanted else []):
        for parameter in layers.first.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)


CASES = [
    *((name, "captured") for name in ("gpipe", "1f1b", "interleaved_1f1b", "zb2p", "zbv", "v_half")),
    ("1f1b", "plain"),
    ("zb2p", "plain, deferring, with hooks"),
    ("zbv", "wrapped, deferring"),
]


@pytest.mark.parametrize(("schedule", "stages"), CASES)
@on_ranks(2)
def test_replays_give_the_gradients_of_the_whole_model(rank: int, schedule: str, stages: str) -> None:
    """Each unit in flight keeps what its backward needs, although replays write to the same memory again."""
    expected = build(schedule, 2, "wrapped" in stages)
    hook(expected, "hooks" in stages)
    losses = list(train(schedule, expected, lambda x: x))
    chunks = build(schedule, 2, "wrapped" in stages, cuda_graphs=True)
    with on_lazy_device(chunks) as lazy, traced_on_cpu():
        before = lazy.cuda.NUM_GRAPHS
        example = lazy.device.to_device(torch.zeros(LENGTH, 1, WIDTH, dtype=torch.float64))
        for chunk in chunks:
            if stages == "captured":
                capture(chunk, (example,), input_tensor=None if chunk.info.is_first else example)
            elif "deferring" in stages:
                convert(chunk)
        hook(chunks, "hooks" in stages)
        got, graphs = [], []
        for reports in train(schedule, chunks, lazy.device.to_device):
            got.append([lazy.device.to_host(one) for one in reports])
            graphs.append(lazy.cuda.NUM_GRAPHS - before)
        assert got == losses
        in_flight = make_plan(schedule, 2, MICROBATCHES).peak_in_flight(rank)
        num_graphs = 2 + 2 * ("deferring" in stages)  # F, B and each W, at least
        assert graphs[2] == graphs[1] >= num_graphs * in_flight  # and then no more
        for mine, theirs in zip(chunks, expected, strict=True):
            gradients = {name: lazy.device.to_host(p.grad) for name, p in layers_of(mine).named_parameters()}
            assert_same_gradients([layers_of(theirs)], gradients, schedule)
            assert lazy.device.to_host(layers_of(mine).num_calls) == layers_of(theirs).num_calls


def delaying(chunk: Any) -> None:
    chunk.layers.first.backward_dw = lambda: None


def in_segments(chunk: Any) -> None:
    chunk.forward_segments = lambda x: iter([x])


@pytest.mark.parametrize(
    ("config", "change", "text"),
    [
        ({"recompute": "all"}, None, r"config.recompute would free nothing: capture\(recompute=True\)"),
        (
            {"offload_activations": 1.0},
            None,
            "stage 0 .* with config.offload_activations: set that to None",
        ),
        ({"num_sequence_slices": 2}, None, "stage 0 .* cut into slices by config.num_sequence_slices"),
        ({}, nn.Module.compile, "stage 0 .* compiled as a whole: compile its layers"),
        ({}, delaying, "stage 0 .* whose backward_dw.* build them without delay_wgrad_compute"),
        ({}, in_segments, "stage 0 .* has collectives between the segments of its forward"),
    ],
)
@on_ranks(1)
def test_what_is_refused(rank: int, config: dict[str, Any], change: Any, text: str) -> None:
    chunks = build("1f1b", 1, cuda_graphs=True, **config)
    with pytest.raises(ValueError, match="is for stages on CUDA, but the model is on cpu"):
        step("1f1b", chunks, lambda x: x, 0)
    if change is not None:
        change(chunks[0])
    with on_lazy_device(chunks) as lazy, pytest.raises(ValueError, match=text):
        step("1f1b", chunks, lazy.device.to_device, 0)


def reads(layers: Layers, x: Tensor) -> Tensor:
    return Layers.forward(layers, x) * float(x.sum())


def keeps(layers: Layers, x: Tensor) -> Tensor:
    layers.kept = x
    return Layers.forward(layers, x)


def borrows(layers: Layers, x: Tensor) -> Tensor:
    return Layers.forward(layers, x) * BORROWED[0]


def calls_twice(layers: Layers, x: Tensor) -> Tensor:
    return layers(x) + layers(x)


BORROWED: list[Tensor] = []


@pytest.mark.parametrize(
    ("forward", "text"),
    [
        (reads, r"the forward of the stage Layers cannot be recorded as a CUDA graph \(.*unset config.cuda_graphs"),
        (keeps, "keeps a tensor as Layers.kept"),
        (borrows, r"uses a parameter of shape \[4\] that is no attribute of one of its modules"),
        (calls_twice, "a stage was called twice for one microbatch"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_recorded_fails_on_every_rank(rank: int, forward: Any, text: str) -> None:
    chunks = build("1f1b", 2, is_wrapped=True, cuda_graphs=True)
    with on_lazy_device(chunks) as lazy:
        BORROWED[:] = [nn.Parameter(lazy.device.to_device(torch.ones(WIDTH, dtype=torch.float64)))]
        changed = chunks[0] if forward is calls_twice else chunks[0].module
        if rank == 0:
            changed.forward = partial(forward, chunks[0].module)
        attributes = vars(changed).get("forward"), "forward" in vars(chunks[0].module)
        with pytest.raises(RuntimeError, match=text):
            step("1f1b", chunks, lazy.device.to_device, 0)
        assert attributes == (vars(changed).get("forward"), "forward" in vars(chunks[0].module))
