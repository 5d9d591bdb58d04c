"""Schedules with a split backward around models that are not as simple as they might be."""

import contextlib
import functools
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from tools.against import Received, use_groups
from tools.models import BATCH, SEQUENCE, Stage, add_gradients, assert_same_gradients, build, reference, run
from tools.ranks import RankPool, on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import PipelineError, StageInfo, stages_for_rank, weight_grad
from megapipe.analysis import TimelineRecorder
from megapipe.plan import Costs, Plan, make_plan
from megapipe.plan.weight_placement import fill

SPLIT = ["zb1p", "zb2p", "interleaved_zb1p", "combined_zb1p", "zbv", "v_half", "v_min", "dualpipev"]
SEED = random.randrange(2**32)


class Twice(nn.Module):
    """Uses one weight on both sides of another layer, and in some microbatches not at all."""

    def __init__(self, hidden: int, layer: int) -> None:
        super().__init__()
        torch.manual_seed(500 + layer)
        self.tied = nn.Linear(hidden, hidden)
        self.between = nn.Linear(hidden, hidden, bias=False)
        self.layer = layer

    def forward(self, x: Tensor, seed: int) -> Tensor:
        if (seed + self.layer) % 3 == 0:
            return x
        return x + self.tied(F.gelu(self.between(F.gelu(self.tied(x)))))


class Odd(Received):
    """A stage of such layers between an embedding and a head, with some parameters frozen."""

    def __init__(self, info: StageInfo, num_layers: int, hidden: int, frozen: float, seed: int, deferred: bool) -> None:
        super().__init__(info, hidden_size=hidden)
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, hidden) if info.is_first else None
        layers = megapipe.distribute_layers(num_layers, info)
        self.layers = nn.ModuleDict({str(layer): Twice(hidden, layer) for layer in layers})
        torch.manual_seed(2)
        self.head = nn.Linear(hidden, 11) if info.is_last else None
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(random.Random(f"{seed} {name}").random() >= frozen)
        if deferred:
            weight_grad.convert(self)

    def forward(self, tokens: Tensor, seed: int) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x, seed)
        return x if self.head is None else self.head(x)


def random_configurations(rank: int, pp_size: int, seed: int, count: int) -> None:
    draw = random.Random(seed)
    for _ in range(count):
        schedule = draw.choice(SPLIT)
        num_chunks = {"interleaved_zb1p": draw.choice([1, 2, 3]), "combined_zb1p": draw.choice([2, 3])}.get(schedule)
        m, hidden, frozen = draw.randint(1, 9), draw.choice([1, 3, 8, 33]), draw.choice([0.0, 0.3, 0.8])
        num_layers = draw.randint(pp_size * (num_chunks or 2), 14)
        what = f"seed {seed}: {schedule} pp={pp_size} chunks={num_chunks} m={m} {hidden=} {frozen=} {num_layers=}"
        use_groups()
        infos = stages_for_rank(schedule, num_chunks=num_chunks)
        sizes = (num_layers, hidden, frozen, seed)
        chunks = [Odd(info, *sizes, deferred=True) for info in infos]
        whole = Odd(StageInfo(0, 1), *sizes, deferred=False)
        add_gradients(whole, m)
        run(schedule, chunks, m)
        assert_same_gradients(chunks, whole, what)


@pytest.mark.parametrize(("pp_size", "count"), [(2, 12), (3, 10), (4, 10)])
def test_random_configurations(ranks: RankPool, pp_size: int, count: int) -> None:
    print(f"seed {SEED}")
    ranks.run(pp_size, random_configurations, pp_size, SEED, count)


# Tied embedding and head


@pytest.mark.parametrize("schedule", ["zbv", "v_half", "v_min"])
@on_ranks(2)
def test_embedding_and_head_that_share_a_rank_are_one_parameter(rank: int, schedule: str) -> None:
    chunks = build(schedule, 2, 4, deferred=True)
    whole = Stage(StageInfo(0, 1), 4)
    whole.head.weight = whole.embedding.weight
    if rank == 0:
        chunks[1].head.weight = chunks[0].embedding.weight
    add_gradients(whole, 6)
    run(schedule, chunks, 6)
    # The two uses add their gradients up in another order than in one backward.
    assert_same_gradients(chunks, whole, atol=1e-6)


# Custom functions


class Cube(torch.autograd.Function):
    """A function of a user's, with a weight that it defers by itself."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x**3 * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        Cube.calls.append("B")

        def compute() -> Tensor:
            Cube.calls.append("W")
            return (grad * x**3).sum((0, 1))

        weight_grad.defer(ctx.weight, compute)
        return grad * 3 * x**2 * ctx.weight, None


class WithFunction(Stage):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scale = nn.Parameter(torch.full((self.config.hidden_size,), 0.1))

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        x = Cube.apply(x, self.scale)
        return x if self.head is None else self.head(x)


@on_ranks(2)
def test_custom_functions_run_once(rank: int) -> None:
    for schedule in ("1f1b", "zb1p"):
        (chunk,) = build(schedule, 2, 2, kind=WithFunction)
        Cube.calls.clear()
        calls: list[Tensor] = []
        chunk.scale.register_post_accumulate_grad_hook(calls.append)
        run(schedule, [chunk], 4)
        assert Cube.calls.count("B") == Cube.calls.count("W") == len(calls) == 4
        grads = chunk.scale.grad
        if schedule == "1f1b":
            expected = grads
    assert torch.equal(grads, expected)


class Delayed(nn.Linear):
    """Puts its weight gradient off by itself, as transformer-engine's layers do.

    Args:
        way: what it does with the gradient. Newer ones assign it, older ones keep that which is there.
    """

    def __init__(self, *args: Any, way: str) -> None:
        super().__init__(*args)
        self.queue: list[tuple[Tensor, Tensor]] = []
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight.detach(), self.bias)
        if out.requires_grad:
            out.register_hook(lambda grad: self.queue.append((x.detach(), grad)))
        return out

    def backward_dw(self) -> None:
        x, grad = self.queue.pop(0)
        gradient = grad.flatten(0, 1).t() @ x.flatten(0, 1)
        if self.way == "main_grad":
            self.weight.main_grad += gradient
        elif self.way == "assign" or self.weight.grad is None:
            self.weight.grad = gradient
        elif self.way == "add":
            self.weight.grad += gradient


@pytest.mark.parametrize(
    ("way", "has_main_grad"),
    [("assign", False), ("keep the first", False), ("add", False), ("assign", True), ("main_grad", True)],
)
@on_ranks(2)
def test_modules_with_backward_dw(rank: int, way: str, has_main_grad: bool) -> None:
    """Most of them do not add to what is there, so that of all microbatches only the last, or the first, was left."""
    for schedule in ("1f1b", "zb1p", "zbv", "interleaved_zb1p"):
        chunks = build(schedule, 2, 4)
        plain = build(schedule, 2, 4)
        for chunk in chunks:
            for block in chunk.layers.values():
                delayed = Delayed(block.down.in_features, block.down.out_features, way=way)
                delayed.load_state_dict(block.down.state_dict())
                if has_main_grad:
                    delayed.weight.main_grad = torch.zeros_like(delayed.weight)
                block.down = delayed
        for step in range(2):
            run(schedule, chunks, 5, seed=step)
            run(schedule, plain, 5, seed=step)
        for chunk, other in zip(chunks, plain):
            for block in chunk.layers.values():
                assert not block.down.queue
                if has_main_grad:
                    assert block.down.weight.grad is None
                    block.down.weight.grad = block.down.weight.main_grad
            assert_same_gradients([chunk], other)


# Data parallelism


class Sync:
    """A no_sync_func, and those who look at parameters while it does not hold them back."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.held = 0
        self.seen: list[list[Tensor | None]] = [[] for _ in parameters]
        self.nodes = [parameter.expand_as(parameter).grad_fn.next_functions[0][0] for parameter in parameters]
        for parameter, node, seen in zip(parameters, self.nodes, self.seen):
            node.register_hook(functools.partial(self._look, parameter, seen))

    def _look(self, parameter: nn.Parameter, seen: list[Tensor | None], *grads: object) -> None:
        if not self.held:
            seen.append(None if parameter.grad is None else parameter.grad.clone())

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.held += 1
        yield
        self.held -= 1


@pytest.mark.parametrize("schedule", ["zb1p", "zbv"])
@on_ranks(2)
def test_those_who_watch_gradient_nodes_see_them_once_and_complete(rank: int, schedule: str) -> None:
    """As Megatron's DistributedDataParallel does."""
    chunks = build(schedule, 2, 6, deferred=True)
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    chunks[0].config.no_sync_func = (sync := Sync(parameters)).no_sync
    run(schedule, chunks, 5)
    for seen, parameter in zip(sync.seen, parameters):
        assert len(seen) == 1
        assert torch.equal(seen[0], parameter.grad)


# Ws where measured times want them


class Slow(Stage):
    """Its B takes longer than its F, and its W less."""

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        time.sleep(0.002)
        out = super().forward(tokens, seed)
        out.register_hook(lambda grad: time.sleep(0.004))
        return out


def placed(rank: int, schedule: str, m: int) -> list[list[str]]:
    grads = []
    recorder = TimelineRecorder()
    chunks = build(schedule, 4, 8, kind=Slow, deferred=True, record_timeline=recorder)
    plan: Any = schedule
    for step in (0, 1):
        for chunk in chunks:
            chunk.zero_grad()
        run(plan, chunks, m)
        grads.append([p.grad for chunk in chunks for p in chunk.parameters()])
        if step == 0:
            measured = recorder.gather()
            assert isinstance(measured.tuned_plan(), Plan)
            # A W wherever a rank would wait with other times: those of a busy machine may want it where it was.
            plan = fill(measured.plan, Costs(1.0, 3.0, 0.5), 1000, 0.0)
    assert all(map(torch.equal, *grads))
    return plan.cells()


@pytest.mark.parametrize("schedule", ["zbv", "zb1p", "dualpipev", "v_min"])
def test_placed_weights_change_no_gradient(ranks: RankPool, schedule: str) -> None:
    cells = ranks.run(4, placed, schedule, 6)
    assert all(rank == cells[0] for rank in cells)
    assert cells[0] != make_plan(schedule, 4, 6).cells()


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
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            assert parameter.grad is None
            parameter.grad = parameter.main_grad
        assert_same_gradients(chunks, reference(4, 3)[0], schedule)


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
