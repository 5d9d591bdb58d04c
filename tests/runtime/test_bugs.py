"""Bugs that were there once. Each test tells the story of its bug."""

import contextlib
import copy
import functools
import itertools
import random
import re
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from models import BATCH, SEQUENCE, Stage, assert_same_gradients, build, forward_step, reference, run
from ranks import RankPool
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import megapipe
from megapipe import PipelineError, StageInfo, parallel_state, weight_grad
from megapipe.analysis import load_timeline
from megapipe.messages import MessageSpec, TensorSpec
from megapipe.overlap import run_segments
from megapipe.plan import ScheduleError, Settings, Verbs, load_plan, make_plan, v_shape
from megapipe.weight_grad import DeferredGrads, deferring

TOKEN = MessageSpec("tensor", (TensorSpec((1,), torch.float32, False),))


class WrapperWithBuffers(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.buffers = []

    def forward(self, *args: object) -> object:
        return self.module(*args)


def a_wrapper_has_buffers_of_its_own(rank: int) -> None:
    (chunk,) = build("1f1b", 2, 4)
    run("1f1b", WrapperWithBuffers(chunk), 2)
    assert_same_gradients([chunk], reference(4, 2)[0])


def test_a_wrapper_may_call_something_else_buffers(ranks: RankPool) -> None:
    """The device was found by asking the model for its buffers. Megatron's DistributedDataParallel keeps a list of
    gradient buffers under that name, and every step of a wrapped model failed."""
    ranks.run(2, a_wrapper_has_buffers_of_its_own)


class StrictTimer:
    def __init__(self) -> None:
        self.running = False

    def start(self, barrier: bool = False) -> None:
        assert not self.running, "timer has already been started"
        self.running = True

    def stop(self) -> None:
        assert self.running
        self.running = False


def timers_after_a_failure(rank: int) -> None:
    timers: dict[str, StrictTimer] = {}
    (chunk,) = build("1f1b", 2, 4)
    chunk.config.timers = lambda name, log_level=0: timers.setdefault(name, StrictTimer())
    with pytest.raises((PipelineError, ValueError)):
        run("1f1b", chunk, 2, data_iterator=iter([]))
    chunk.zero_grad()
    run("1f1b", chunk, 2)
    assert_same_gradients([chunk], reference(4, 2)[0])


def test_timers_are_stopped_by_a_failure(ranks: RankPool) -> None:
    """A step that failed left its timers running. Megatron's refuse to be started twice, so the next step failed on
    them."""
    ranks.run(2, timers_after_a_failure)


def wrapped_by_torch(rank: int) -> int:
    """Two replicas of a pipeline of one rank, kept in step by torch's DistributedDataParallel."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    (chunk,) = build("no_pipelining", 1, 2)
    calls = 0

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        return default_hooks.allreduce_hook(None, bucket)

    model = torch.nn.parallel.DistributedDataParallel(chunk)
    model.register_comm_hook(None, count)
    chunk.config.no_sync_func = model.no_sync
    run("no_pipelining", model, 3, seed=rank)
    grads = [torch.empty_like(chunk.head.weight) for _ in range(2)]
    dist.all_gather(grads, chunk.head.weight.grad)
    assert torch.equal(*grads)
    return calls


def test_no_sync_of_torchs_data_parallelism(ranks: RankPool) -> None:
    """The last forward ran without synchronisation, and only the last backward with it. torch's
    DistributedDataParallel prepares its reduction in the forward, so that nothing was ever reduced."""
    assert ranks.run(2, wrapped_by_torch) == [1, 1]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


def output_of_a_python_function(rank: int) -> None:
    (chunk,) = build("gpipe", 2, 4)

    def step(data_iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> object:
        output, loss_func = forward_step(data_iterator, model)
        return (Double.apply(output) if rank == 0 else output), loss_func

    run("gpipe", chunk, 3, forward_step_func=step)
    assert all(p.grad is not None for p in chunk.parameters())


def test_a_stage_may_end_in_a_python_function(ranks: RankPool) -> None:
    """A stage is kept as the edges of its graph. On torch 2.6 an edge does not keep the node of a Python Function
    alive, so that the backward of a stage that ends in one found no graph any more."""
    ranks.run(2, output_of_a_python_function)


def a_frozen_chunk(rank: int) -> None:
    for schedule in ("zb1p", "zbv"):
        chunks = build(schedule, 1, 4, deferred=True, no_sync_func=contextlib.nullcontext)
        chunks[0].requires_grad_(False)
        run(schedule, chunks, 2)


def test_a_chunk_without_trainable_parameters_under_no_sync(ranks: RankPool) -> None:
    """After a chunk's last W autograd passes by its parameters once more, for those who watch its nodes. With nothing
    to train in a chunk there was nothing to pass by, and the step failed with autograd's words for that."""
    ranks.run(1, a_frozen_chunk)


class SeesAutocast(Stage):
    def forward_segments(self, tokens: Tensor, seed: int = 0) -> Iterator[None]:
        yield
        self.seen = [*getattr(self, "seen", []), torch.is_autocast_enabled("cpu")]
        return super().forward(tokens, seed)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        return run_segments(self.forward_segments(tokens, seed))


def autocast_in_pairs(rank: int) -> None:
    options = {"enable_autocast": True, "autocast_dtype": torch.bfloat16, "variable_seq_lengths": True}
    build("dualpipev", 2, 4)
    chunks = [SeesAutocast(info, 4, **options) for info in megapipe.stages_for_rank("dualpipev")]
    run("dualpipev", chunks, 4)
    assert all(chunk.seen == [True] * 4 for chunk in chunks)


def test_autocast_in_overlapped_forwards(ranks: RankPool) -> None:
    """A forward in segments takes autocast along from where it is made, which was behind the end of the stage's. So
    forwards of overlapped pairs ran in float32, and all others in half precision."""
    ranks.run(2, autocast_in_pairs)


def test_bounds_of_overlapped_pairs() -> None:
    """A pair's chunks were taken for the same one in the lower bound, which came out above the step itself."""
    uneven = make_plan("dualpipev", 1, 8).simulate([10, 1], [0.5, 5], [0.5, 5], overlap=1.0)
    assert uneven.lower_bound <= uneven.makespan
    draw = random.Random(0)
    for pp_size, m in ((2, 5), (3, 7), (4, 8)):
        for _ in range(20):
            times = ([draw.uniform(0.3, 2.0) for _ in range(2 * pp_size)] for _ in range(3))
            simulation = make_plan("dualpipev", pp_size, m).simulate(*times, p2p=0.1, overlap=draw.random())
            assert simulation.lower_bound <= simulation.makespan + 1e-9


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


def a_hook_insists_on_a_gradient(rank: int) -> None:
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


def test_a_hook_that_insists_on_a_gradient_finds_one(ranks: RankPool) -> None:
    """Megatron's hooks, with reductions that overlap, fail where they find no gradient when autograd has passed by. So
    every step of a model whose weight gradients are put off, or added to `main_grad` at once, ended there."""
    ranks.run(2, a_hook_insists_on_a_gradient)


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


def gradients_that_share_memory(rank: int) -> None:
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


def test_an_input_gradient_shares_no_memory_with_a_parameters(ranks: RankPool) -> None:
    """Autograd may make a view of one and the same tensor a parameter's `.grad` and another one the input's gradient.
    The next microbatch was then added to both, and what was on its way to the stage below was silently wrong."""
    ranks.run(1, gradients_that_share_memory)


def test_embeddings_of_32_bit_tokens_and_complex_layers() -> None:
    """From the second microbatch on the gradient of an embedding with 32-bit tokens and more rows than tokens was added
    by an operation for 64 bits, which failed. Gradients of complex layers lacked the conjugate and were silently
    wrong."""
    tokens = torch.tensor([1, 7, 7, 0], dtype=torch.int32)
    x = torch.randn(5, 3, dtype=torch.complex64)
    for layer, data in ((torch.nn.Embedding(9, 4), tokens), (torch.nn.Linear(3, 4, dtype=torch.complex64), x)):
        deferring = weight_grad.convert(copy.deepcopy(layer))
        for _ in range(2):
            layer(data).abs().square().sum().backward()
            deferred = DeferredGrads()
            with deferring(deferred):
                deferring(data).abs().square().sum().backward()
            deferred.run()
        for ours, torchs in zip(deferring.parameters(), layer.parameters()):
            assert torch.equal(ours.grad, torchs.grad)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0F0,0B0\n", "recv_forward.0. more often than there are microbatches .1."),
        ("0F0,0F2,0B0,0B2\n", "0RECV_F2 on rank 0 where 0RECV_F1 is next"),
        ("0F0,0F1,0B0\n", "after 1 calls of recv_backward.0.; there are 2 microbatches"),
        ("0B0,0F0\n", "recv_backward.0. for microbatch 0 before send_forward.0."),
        ("0F0,0W0,0B0\n", "has put no weight gradient of that chunk off"),
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


SETTINGS_THAT_CANNOT_BE: list[tuple[dict[str, Any], str]] = [
    ({"timeout": None}, "config.timeout must be a finite number, got None"),
    ({"timeout": -5.0}, "config.timeout must be more than 0 seconds, got -5"),
    ({"timeout": 1e16}, "config.timeout must be at most 1e+09 seconds (30 years), got 1e+16"),
    ({"p2p_lookahead": -1}, "config.p2p_lookahead must be a whole number from 0 on, or None, got -1"),
    ({"p2p_lookahead": 1.5}, "config.p2p_lookahead must be a whole number from 0 on, or None, got 1.5"),
    ({"max_in_flight": float("inf")}, "config.max_in_flight must be a finite number, got inf"),
    ({"microbatch_group_size_per_vp_stage": 2.5}, "must be a whole number from 1 on, or None, got 2.5"),
    ({"pipeline_dtype": "float32"}, "config.pipeline_dtype must be a torch.dtype, like torch.bfloat16, or None"),
    ({"hidden_size": 16.0}, "config.hidden_size must be a whole number from 1 on, or None, got 16.0"),
    ({"tensor_model_parallel_size": 0}, "config.tensor_model_parallel_size must be a whole number from 1 on, got 0"),
    ({"context_parallel_size": None}, "config.context_parallel_size must be a whole number from 1 on, got None"),
    ({"context_parallel_size": 2}, "a sequence of 5 cannot be shared by 2 ranks (context_parallel_size 2"),
    ({"grad_scale_func": 2.0}, "config.grad_scale_func must be a function, or None, got 2.0"),
    ({"no_sync_func": [True, None]}, "config.no_sync_func must be a function, or None, got True"),
    ({"record_timeline": True}, "config.record_timeline must be a megapipe.TimelineRecorder, or None, got True"),
    ({"no_sync_func": [contextlib.nullcontext]}, "config.no_sync_func is a list of 1 but there are 2 chunks"),
    ({"grad_sync_func": []}, "config.grad_sync_func is a list of 0 but there are 2 chunks"),
    ({"param_sync_func": [list] * 3}, "config.param_sync_func is a list of 3 but there are 2 chunks"),
]


def settings_that_cannot_be(rank: int) -> None:
    for options, message in SETTINGS_THAT_CANNOT_BE:
        chunks = build("zbv", 2, 4)
        for chunk in chunks:
            vars(chunk.config).update(options)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            run("zbv", chunks, 2)


def test_settings_that_cannot_be(ranks: RankPool) -> None:
    """A list with a function too few failed in the middle of the step, or held back the synchronisation of the wrong
    chunk. A negative time limit left ranks waiting while they connected, others failed in words that named none; and
    a sequence that its ranks cannot share was cut short."""
    ranks.run(2, settings_that_cannot_be)


def recycled_inputs(rank: int) -> None:
    """As many buffers as microbatches are in flight in 1F1B."""
    chunks = build("zb1p", 2, 4, deferred=True)

    def recycle(buffers: Iterator[Tensor], layer: nn.Module, args: tuple[Tensor]) -> Tensor:
        return next(buffers).detach_().copy_(args[0])

    for layer in (module for module in chunks[0].modules() if isinstance(module, nn.Linear)):
        buffers = itertools.cycle([torch.empty(SEQUENCE, BATCH, layer.in_features) for _ in range(2 - rank)])
        layer.register_forward_pre_hook(functools.partial(recycle, buffers))
    run("1f1b", chunks, 8)
    with pytest.raises((RuntimeError, PipelineError), match="was changed in place between its B and its W"):
        run("zb1p", chunks, 8)


def test_inputs_that_are_written_over_between_b_and_w(ranks: RankPool) -> None:
    """Autograd watches what it needs until B, and nobody watched it from there to W. A layer whose inputs lie in
    buffers, used again once B is done with them, had the weight gradient of another microbatch added to its own."""
    ranks.run(2, recycled_inputs)
