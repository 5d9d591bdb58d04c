"""Bugs that were there once. Each test tells the story of its bug."""

import contextlib
import copy
import functools
import itertools
import random
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from models import BATCH, SEQUENCE, Stage, build, forward_step, reference, run
from ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineError, StageInfo, parallel_state, weight_grad
from megapipe.analysis import load_timeline
from megapipe.messages import MessageSpec, TensorSpec
from megapipe.overlap import run_segments
from megapipe.plan import ScheduleError, Settings, Verbs, load_plan, make_plan, v_shape
from megapipe.weight_grad import DeferredGrads, deferring

TOKEN = MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@on_ranks(2)
def test_a_stage_may_end_in_a_python_function(rank: int) -> None:
    """A stage is kept as the edges of its graph. On torch 2.6 an edge does not keep the node of a Python Function
    alive, so that the backward of a stage that ends in one found no graph any more."""
    (chunk,) = build("gpipe", 2, 4)

    def step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> object:
        output, loss_func = forward_step(data_iterator, model)
        return (Double.apply(output) if rank == 0 else output), loss_func

    run("gpipe", chunk, 3, forward_step_func=step)
    assert all(p.grad is not None for p in chunk.parameters())


class SeesAutocast(Stage):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        yield
        self.seen = [*getattr(self, "seen", []), torch.is_autocast_enabled("cpu")]
        return super().forward(tokens, seed)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        return run_segments(self.forward_segments(tokens, seed))


@on_ranks(2)
def test_autocast_in_overlapped_forwards(rank: int) -> None:
    """A forward in parts takes autocast along from where it is made, which was behind the end of the stage's. So
    forwards of overlapped pairs ran in float32, and all others in half precision."""
    options = {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "variable_seq_lengths": True}
    build("dualpipev", 2, 4)
    chunks = [SeesAutocast(info, 4, **options) for info in megapipe.stages_for_rank("dualpipev")]
    run("dualpipev", chunks, 4)
    assert all(chunk.seen == [True] * 4 for chunk in chunks)


def test_bounds_and_paths_of_overlapped_pairs() -> None:
    """A pair's chunks were taken for the same one in the lower bound, which came out above the step itself; and the
    critical path followed only the forward's message where the backward's came later."""
    uneven = make_plan("dualpipev", 1, 8).simulate([10, 1], [0.5, 5], [0.5, 5], overlap=1.0)
    assert uneven.lower_bound <= uneven.makespan
    draw = random.Random(0)
    for pp_size, m in ((2, 5), (3, 7), (4, 8)):
        for _ in range(20):
            times = ([draw.uniform(0.3, 2.0) for _ in range(2 * pp_size)] for _ in range(3))
            simulation = make_plan("dualpipev", pp_size, m).simulate(*times, p2p=0.1, overlap=draw.random())
            assert simulation.lower_bound <= simulation.makespan + 1e-9
            path = simulation.critical_path()
            assert path[0][1].start == 0
            for (_, before), (_, after) in itertools.pairwise(path):
                assert -1e-9 <= after.start - before.end <= 0.1 + 1e-9


def test_a_limit_in_flight_that_fits_exactly() -> None:
    """A chunk's share of a microbatch is a third, and forty-eight of those add up to a little more than sixteen."""
    assert make_plan("looped_bfs", 2, 16, 3, settings=Settings(max_in_flight=16.0)).num_microbatches == 16


def receives_too_early(pipe: Verbs) -> None:
    pipe.recv_forward(0)
    pipe.recv_forward(1)
    pipe.forward_step(0)
    pipe.send_forward(0)
    pipe.forward_step(1)
    pipe.send_forward(1)
    return pipe.finish()


def test_a_receive_from_the_same_rank_before_its_send() -> None:
    """A rank hands tensors to itself, and cannot take what it has not made. The check of plans let that pass, and an
    assertion failed in the step."""
    early = megapipe.plan.registry.Schedule("early", receives_too_early, v_shape, 2, forward_only=True)
    with pytest.raises(ScheduleError, match="takes 1RECV_F0 on rank 0 before 0SEND_F0, which is on the same rank"):
        make_plan(early, 1, 1).check()


class Watched(torch.autograd.Function):
    """A fused layer of somebody's, which keeps its input as an attribute."""

    alive: ClassVar[list[weakref.ref[Tensor]]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x * 1.0
        Watched.alive.append(weakref.ref(ctx.kept))
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2.0


def test_w_holds_no_graph() -> None:
    """What a layer kept for W was the input as autograd knew it, and with it every node that had made it. Functions of
    other people that keep tensors as attributes kept them until W."""
    layer = weight_grad.Linear(4, 4)
    deferred = DeferredGrads()
    output = layer(Watched.apply(torch.ones(2, 4, requires_grad=True)))
    with deferring(deferred):
        output.sum().backward()
    del output
    assert Watched.alive[0]() is None
    deferred.run()
    assert layer.weight.grad is not None


@on_ranks(2)
def test_a_hook_that_insists_on_a_gradient_finds_one(rank: int) -> None:
    """Megatron's hooks, with reductions that overlap, fail where they find no gradient when autograd has passed by. So
    every step of a model whose weight gradients are put off, or added to `main_grad` at once, ended there."""
    for schedule in ("1f1b", "zb1p", "zbv"):
        chunks = build(schedule, 2, 4, deferred=True, no_sync_func=contextlib.nullcontext)
        nodes = []
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            parameter.main_grad, parameter.grad_added_to_main_grad = torch.zeros_like(parameter), False

            def hook(*grads: object, parameter: torch.nn.Parameter = parameter) -> None:
                assert parameter.grad is not None
                if not parameter.grad_added_to_main_grad:
                    parameter.main_grad += parameter.grad
                parameter.grad = None

            nodes.append(parameter.expand_as(parameter).grad_fn.next_functions[0][0])
            nodes[-1].register_hook(hook)
        run(schedule, chunks, 3)
        expected = dict(reference(4, 3)[0].named_parameters())
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                assert parameter.grad is None
                assert torch.equal(parameter.main_grad, expected[name].grad), f"{schedule}, {name}"


class Shifted(torch.nn.Module):
    """Scales its input, or shifts it, both seen as matrices: then the shift's gradient is a view, and the input's."""

    def __init__(self, info: StageInfo) -> None:
        super().__init__()
        self.info = info
        self.config = SimpleNamespace(hidden_size=3)
        self.weight = torch.nn.Parameter(torch.arange(12.0 if info.index % 2 else 3.0))
        self.input: Any = None

    def set_input_tensor(self, tensors: list[Tensor]) -> None:
        self.input = tensors[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.info.is_first else self.input
        if self.info.index % 2:
            return (x.view(4, 3) + self.weight.view(4, 3)).view(2, 2, 3)
        return x * self.weight


@on_ranks(1)
def test_an_input_gradient_shares_no_memory_with_a_parameters(rank: int) -> None:
    """Autograd may make a view of one and the same tensor a parameter's `.grad` and another one the input's gradient.
    The next microbatch was then added to both, and what was on its way to the stage below was silently wrong."""
    parallel_state.initialize_model_parallel(1)
    inputs = [torch.full((2, 2, 3), float(number)) for number in range(1, 5)]
    stages = [StageInfo(0, 2), StageInfo(1, 2)]
    chunks, expected = ([Shifted(info) for info in stages] for _ in range(2))
    megapipe.get_forward_backward_func("looped_bfs")(
        forward_step_func=lambda data, model: (model(next(data)), lambda out: (out.square().sum(), None)),
        data_iterator=iter(inputs),
        model=chunks,
        num_microbatches=4,
    )
    for x in inputs:
        expected[1].input = expected[0](x)
        (expected[1](x).square().sum() / 4).backward()
    for chunk, whole in zip(chunks, expected):
        assert torch.equal(chunk.weight.grad, whole.weight.grad)


def test_embeddings_of_32_bit_tokens_and_complex_layers() -> None:
    """From the second microbatch on the gradient of an embedding with 32-bit tokens and more rows than tokens was added
    by an operation for 64 bits, which failed. Gradients of complex layers lacked the conjugate and were silently
    wrong."""
    tokens = torch.tensor([1, 7, 7, 0], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.complex64)
    for layer, data in ((torch.nn.Embedding(9, 4), tokens), (torch.nn.Linear(3, 4, dtype=torch.complex64), x)):
        converted = weight_grad.convert(copy.deepcopy(layer))
        for _ in range(2):
            layer(data).abs().square().sum().backward()
            deferred = DeferredGrads()
            with deferring(deferred):
                converted(data).abs().square().sum().backward()
            deferred.run()
        for ours, torchs in zip(converted.parameters(), layer.parameters()):
            assert torch.equal(ours.grad, torchs.grad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0\n", "recv_forward.0. more often than there are microbatches .1."),
        ("0F0,0F2,0B0,0B2\n", "0RECV_F2 on rank 0 where 0RECV_F1 is next"),
        ("0F0,0F1,0B0\n", "after 1 calls of recv_backward.0.; there are 2 microbatches"),
        ("0B0,0F0\n", "recv_backward.0. for microbatch 0 before send_forward.0."),
        ("0F0,0W0,0B0\n", "has no deferred weight gradient of that chunk"),
        ("\n,\n", "it has no row of actions"),
        ('{"name": "", "actions": 3}', "it has no row of actions"),
        ('{"name": "", "actions": [[1]]}', "'1' is not an action like"),
    ],
)
def test_files_whose_plans_cannot_work(text: str, message: str, tmp_path: Path) -> None:
    """The check of plans trusted that a rank does everything once and a backward after its forward, which is so of
    schedules but not of files. Those without a plan raised whatever the reader stumbled over."""
    path = tmp_path / "plan.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_plan(path).check()


@pytest.mark.parametrize("steps", ["3", "[]", "[[]]", "[[{}]]", '[[{"begin": 0, "end": 1, "actions": [[0, "Q", 0]]}]]'])
def test_files_whose_timelines_cannot_be_read(steps: str, tmp_path: Path) -> None:
    """A damaged timeline made the command fail with a traceback."""
    path = tmp_path / "timeline.json"
    path.write_text(f'{{"timeline": "1f1b", "steps": {steps}}}')
    with pytest.raises(ValueError, match=r"timeline.json does not hold .*: record a new one."):
        load_timeline(path)


def test_times_that_cannot_be() -> None:
    """Where nothing takes any time, the bubble was a division by zero. Negative times, and those that are no numbers,
    were simulated without a word, to bubbles above 100% and steps shorter than nothing."""
    plan = make_plan("1f1b", 2, 3)
    nothing = plan.simulate(0.0, 0.0, 0.0)
    assert nothing.bubble == nothing.inner_bubble == [0.0, 0.0]
    for name, value in (("forward", -1.0), ("p2p", float("nan")), ("backward_weight", [1.0, float("inf")])):
        with pytest.raises(ValueError, match=f"{name} must be a finite number from 0 on"):
            plan.simulate(**{name: value})
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        plan.simulate(num_steps=0)


@on_ranks(2)
def test_inputs_that_are_written_over_between_b_and_w(rank: int) -> None:
    """Autograd watches what it needs until B, and nobody watched it from there to W. A layer whose inputs lie in
    buffers, used again once B is done with them, had the weight gradient of another microbatch added to its own.

    As many buffers as microbatches are in flight in 1F1B."""
    chunks = build("zb1p", 2, 4, deferred=True)

    def recycle(buffers: Iterator[Tensor], layer: nn.Module, args: tuple[Tensor]) -> Tensor:
        return next(buffers).detach_().copy_(args[0])

    for layer in (module for module in chunks[0].modules() if isinstance(module, nn.Linear)):
        buffers = itertools.cycle([torch.empty(SEQUENCE, BATCH, layer.in_features) for _ in range(2 - rank)])
        layer.register_forward_pre_hook(functools.partial(recycle, buffers))
    run("1f1b", chunks, 8)
    with pytest.raises((RuntimeError, PipelineError), match="was changed in place between its B and its W"):
        run("zb1p", chunks, 8)
