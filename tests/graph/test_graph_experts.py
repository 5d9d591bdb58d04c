"""Captured stages whose sizes depend on values: mixtures of experts that drop no token, boolean masks, counts."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tools.experts import HIDDEN, ROUTINGS, differing, make_stage, run_all, steer
from tools.graphs import quick_inductor, skip_without_tracer
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule

from megapipe import graph
from megapipe.graph import capture, joint_graph, multiplex, size_reads
from megapipe.graph.multiplexing import PART
from megapipe.graph.nodes import is_compute_bound, is_wait
from megapipe.overlap import filling_windows
from megapipe.weight_grad import DeferredGrads

skip_without_tracer()


def tokens(number: int) -> Tensor:
    return torch.randn(number, HIDDEN, requires_grad=True)


def worst_difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative to the largest number of each."""
    pairs = zip(ours, theirs)
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=1e-9)) for one, other in pairs)


# Experts, alone


@on_ranks(2)
def test_experts_shared_out_are_equal_to_eager_for_every_routing(rank: int) -> None:
    """Outputs, gradients, and the loads that routers count, of microbatches of another length on each rank."""
    num_tokens = 12 - 3 * rank
    eager, captured = (make_stage(dist.group.WORLD, 1) for _ in range(2))
    capture(captured, (tokens(num_tokens),))
    biases = [both[rank] for both in ROUTINGS.values()]
    expected = run_all(eager, biases, num_tokens, split=False)
    for split in (False, True):
        assert differing(run_all(captured, biases, num_tokens, split), expected) == []


@pytest.mark.parametrize("way", ["autocast", "recomputed, in eval, one token for each expert"])
@on_ranks(1)
def test_experts_in_other_ways(rank: int, way: str) -> None:
    """A rank that exchanges tokens with itself. Under autocast all experts are one kernel, `torch._grouped_mm`."""
    settings, num_tokens = ({}, 12) if way == "autocast" else ({"moe_topk": 4}, 1)
    stages = [make_stage(dist.group.WORLD, 1, **settings).train(way == "autocast") for _ in range(2)]
    biases = [both[rank] for both in ROUTINGS.values()]
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        capture(stages[1], (tokens(num_tokens),), recompute=way != "autocast")
        ws = of_stage(stages[1]).split.weights
    expected, found = (run_all(stage, biases, num_tokens, stage is stages[1], way == "autocast") for stage in stages)
    assert differing(found, expected) == []
    operators = [str(node.target) for w in ws for node in w.graph.graph.nodes]
    assert operators.count("megapipe.grouped_gradient.default") == 2, "one for each layer of all experts"


@pytest.mark.soak
@on_ranks(2)
def test_compiled_experts_are_eager_but_for_rounding(rank: int) -> None:
    eager, compiled = make_stage(dist.group.WORLD, 1), make_stage(dist.group.WORLD, 1)
    capture(compiled, (tokens(12),), compile="inductor")
    biases = [both[rank] for both in ROUTINGS.values()]
    expected = run_all(eager, biases, 12, split=False)
    with quick_inductor():
        assert worst_difference(run_all(compiled, biases, 12, split=True), expected) < 1e-5


# Experts, in pairs


def in_pairs(rank: int, stages: list[nn.Sequential], together: bool) -> list[Tensor]:
    """A microbatch for each routing, alternately by the stages: the backward of each in one graph with the forward of
    the next, or before it."""
    torch.manual_seed(7)
    results: list[Tensor] = []
    backward: Callable[[], object] | None = None
    for number, routing in enumerate(ROUTINGS.values()):
        stage, x, grad = stages[number % len(stages)], tokens(12), torch.randn(12, HIDDEN)
        steer(stage, routing[rank])
        if backward is None:
            y = stage(x)
        elif together:
            y = in_one(stage.forward_segments(x), backward)
        else:
            backward()
            y = stage(x)
        results += [y.detach().clone(), x]
        backward = lambda y=y, grad=grad: y.backward(grad)  # noqa: E731
    backward()
    results = [one.grad if one.requires_grad else one for one in results]
    return [*results, *(p.grad for stage in stages for p in stage.parameters())]


def in_one(forward: Generator[None, None, Tensor], backward: Callable[[], object]) -> Tensor:
    """As a pair runs whose B leaves its weight gradients to a W."""
    deferred = DeferredGrads()
    with deferred, filling_windows(lambda: next(forward, None)):
        backward()
    deferred.run()
    with pytest.raises(StopIteration) as end:
        next(forward)
    return end.value.value


@pytest.mark.soak
@pytest.mark.parametrize("num_stages", [1, 2])
@on_ranks(2)
def test_compiled_pairs_in_one_graph(rank: int, num_stages: int) -> None:
    eager, compiled = ([make_stage(dist.group.WORLD, 1, seed) for seed in range(num_stages)] for _ in range(2))
    for stage in compiled:
        capture(stage, (tokens(12),), compile="inductor")
    expected = in_pairs(rank, eager, together=False)
    with quick_inductor():
        assert worst_difference(in_pairs(rank, compiled, together=True), expected) < 1e-5


def assert_one_mode(forward: nn.Module, backward: nn.Module) -> None:
    """Two stages that communicate could not be compiled as one graph: the trace of each has a mode of its own, and
    inductor takes one. Neither could one stage twice, whose sizes have the same names in both parts, and are others.
    This is what inductor is given, without the minutes that it takes."""
    pair = multiplex(of_stage(forward).partition.forward, of_stage(backward).split.input_gradients)
    given: list[Any] = []

    def look(module: GraphModule, examples: list[Any], what: str) -> Callable[..., Any]:
        given[:] = [module, examples]
        return module.forward

    with mock.patch.object(graph.compile, "_compile", look):
        graph.compile_graph(pair, "a pair")
    module, examples = given
    sizes = [str(one) for one in examples if not isinstance(one, Tensor)]
    assert len(sizes) == len(set(sizes)) > 0
    with torch.no_grad(), examples[0].fake_mode:
        module.forward(list(examples))  # torch refuses to mix modes
    with mock.patch.object(graph.compile, "_compile", look):
        graph.compile_graph(of_stage(forward).partition.forward, "a forward alone")
    known = [node for node in given[0].graph.nodes if node.meta]
    assert known == [], "inductor finds out by itself about sizes that depend on values"


@on_ranks(1)
def test_pairs_in_one_graph(rank: int) -> None:
    """Of one stage, and of two. The host waits while the device has the other part. Counted in the graph of a pair:
    products of the other part between the start and the wait of an exchange, and of a read of sizes. A forward waits
    four times here, and a backward twice, so some are left alone. On the CPU no tensor is on an accelerator, so all are
    taken to be."""
    with mock.patch.object(size_reads, "_is_on_accelerator", lambda node: isinstance(node.meta["val"], Tensor)):
        captured = [capture(make_stage(dist.group.WORLD, 1, seed), (tokens(12),)) for seed in range(2)]
    eager = [make_stage(dist.group.WORLD, 1, seed) for seed in range(2)]
    for of_one in (captured[1:], captured):
        expected = in_pairs(rank, eager[-len(of_one) :], together=False)
        assert differing(in_pairs(rank, of_one, together=True), expected) == []
        assert_one_mode(of_one[0], of_one[-1])
    (pair,) = of_stage(captured[0])._multiplexed.values()
    found = []
    nodes = list(pair.graph.nodes)
    for wait in filter(is_wait, nodes):
        start = wait.all_input_nodes[0]
        between = nodes[nodes.index(start) : nodes.index(wait)]
        others = [node for node in between if is_compute_bound(node) and node.meta[PART] != start.meta[PART]]
        found.append((start.meta[PART], str(start.target).split(".")[1], len(others)))
    assert next(products for _, operator, products in found if operator == "start_read") > 0, found
    assert sum(products > 0 for *_, products in found) >= 3, found


# Beside tensor parallelism


class BesideTensorParallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)
        shares = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self, init_device_mesh("cpu", (2,)), shares)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(x).relu())
        return x.index_put((x[:, 0] > 0,), x[x[:, 0] > 0].sin())


@on_ranks(2)
def test_layers_that_share_out_matrices(rank: int) -> None:
    torch.manual_seed(5)
    x = tokens(12)
    eager, captured = BesideTensorParallel(), capture(BesideTensorParallel(), (x,))
    results = []
    for stage in (eager, captured):
        again = x.detach().requires_grad_()
        y = stage(again)
        y.sin().sum().backward()
        results.append([y, again.grad, *(p.grad.to_local() for p in stage.parameters())])
    assert differing(*results) == []


# Other sizes


def at_most(number: Tensor, most: int) -> int:
    size = number.item()
    torch._check(size >= 0)
    torch._check(size <= most)
    return size


def two_counts(x: Tensor) -> list[int]:
    sizes = torch.stack(((x[:, 0] > 0).sum(), (x[:, 0] <= 0).sum())).tolist()
    torch._check(sum(sizes) == len(x))
    return sizes


class Sizes(nn.Module):
    """A forward of some lines, with sizes that depend on values."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__()
        self.lines = lines
        self.linear, self.other = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return sum((eval(line, globals() | {"self": self, "x": x, "y": y}) for line in self.lines), self.other(y.sin()))


LINES = [
    "self.other(y[y.mean(1) > 0]).sum(0)",
    "y[(y.mean(1) > 0).nonzero()[:, 0]].square().sum(0)",
    "self.linear(y[: at_most((x[:, 0] > 0).sum(), len(x))]).sum()",
    "sum(self.other(part).sum() for part in y.split(two_counts(x)))",
    "y.roll(x[0, 0].long().item(), 0)",
    "y * self.seen.add_((x > 0).nonzero().shape[0])",
    "y[:0].sum() + torch.unique((x * 3).long()).numel()",
    "y.masked_select(y > 0.5).square().sum()",
    "y.index_put((y.mean(1) > 0,), self.linear(y[y.mean(1) > 0]))",  # whose backward has a size of its own
]


@pytest.mark.parametrize(("lines", "recompute"), [(LINES, False), (LINES[-2:], True)])
def test_sizes_that_depend_on_values(lines: list[str], recompute: bool) -> None:
    """Boolean masks, counts and positions, of none and of all rows too, were refused."""
    torch.manual_seed(0)
    eager, captured = Sizes(lines), Sizes(lines)
    captured.load_state_dict(eager.state_dict())
    capture(captured, (tokens(6),), recompute=recompute)
    for data in (torch.randn(6, HIDDEN), -torch.ones(6, HIDDEN), torch.ones(6, HIDDEN), torch.randn(6, HIDDEN)):
        results = []
        for stage in (eager, captured):
            stage.zero_grad()
            x, deferred = data.clone().requires_grad_(), DeferredGrads()
            y = stage(x)
            with deferred:
                y.square().sum().backward()
            deferred.run()
            results.append([y, x.grad, *(p.grad for p in stage.parameters()), *stage.buffers()])
        assert differing(*results) == []


def test_what_a_stage_says_of_its_sizes_is_checked_in_each_forward() -> None:
    stage = capture(Sizes(["x.new_ones(at_most((x > 0).sum(), 2)).sum()"]), (tokens(6),))
    x = -torch.ones(6, HIDDEN)
    stage(x)
    x[:3, 0] = 1
    with pytest.raises(RuntimeError, match=r"Runtime assertion failed for expression u.* <= 2"):
        stage(x)


def test_a_dense_stage_is_traced_without_symbols(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_graph, "SizesRead", None)
    stage = capture(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.GELU()), (tokens(6),))
    assert stage(tokens(6)).shape == (6, HIDDEN)


def of_stage(stage: nn.Module) -> Any:
    return stage.__dict__["_megapipe_graphs"].graphs()
