"""Graphs that communicate: a forward and a backward in one, and those of shards, whose collectives are taken out."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.against import Received, assert_same_gradients, step
from tools.graphs import skip_without_tracer
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.fx import Node

from megapipe import StageInfo, parallel_state, stages_for_rank
from megapipe.graph import capture, multiplex, partition, split_di_dw, split_fsdp_collectives, trace_joint
from megapipe.graph.multiplexing import PART
from megapipe.graph.nodes import is_compute_bound, is_start, is_wait
from megapipe.overlap import start_all_to_all

skip_without_tracer()

H, SEQUENCE, BATCH = 8, 4, 2


class Experts(nn.Module):
    """Each rank sends as many of its tokens to each one's expert, and back."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention, self.up, self.down, self.shared = (nn.Linear(H, H) for _ in range(4))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.attention(x.flatten(0, 1)).relu()
        size = dist.get_world_size(self.group)
        splits = [len(tokens) // size] * size
        dispatch = start_all_to_all(tokens, splits, splits, self.group)
        shared = self.shared(tokens)
        y = self.down(F.gelu(self.up(dispatch.wait())))
        return x + (shared + start_all_to_all(y, splits, splits, self.group).wait()).view_as(x)


class Stage(Received):
    def __init__(self, info: StageInfo, group: dist.ProcessGroup | None) -> None:
        super().__init__(info, hidden_size=H)
        torch.manual_seed(info.index)
        self.layer = Experts(group)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if self.input_tensor is None else self.input_tensor)


@on_ranks(2)
def test_pairs_of_dualpipev_are_multiplexed(rank: int) -> None:
    """Two chunks on each of two ranks that share experts, captured, as eager."""
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    group = parallel_state.get_expert_model_parallel_group()
    eager = [Stage(info, group) for info in stages_for_rank("dualpipev")]
    chunks = []
    for info, stage in zip(stages_for_rank("dualpipev"), eager):
        twin = Stage(info, group)
        twin.load_state_dict(stage.state_dict())
        example = torch.empty(SEQUENCE, BATCH, H)
        chunks.append(capture(twin, (example,), input_tensor=None if info.is_first else example))
    for models in (eager, chunks):
        generator = torch.Generator().manual_seed(rank)
        data = [(torch.randn(SEQUENCE, BATCH, H, generator=generator), None) for _ in range(3)]
        sizes = {"seq_length": SEQUENCE, "micro_batch_size": BATCH}
        step("dualpipev", models, data, lambda output, _: output.square().mean(), in_parts=True, **sizes)
    for one, other in zip(chunks, eager):
        assert_same_gradients([one], other)
    assert any(chunk.__dict__["_megapipe_graphs"].graphs()._multiplexed for chunk in chunks)


@on_ranks(2)
def test_each_half_computes_while_the_other_communicates(rank: int) -> None:
    torch.manual_seed(0)
    layer, x = Experts(dist.group.WORLD), torch.randn(SEQUENCE, BATCH, H, requires_grad=True)
    captured = capture(copy.copy(layer), (x,))
    parts = captured.__dict__["_megapipe_graphs"].graphs().partition
    split = split_di_dw(parts.backward, range(8))
    assert len(split.weights) == 4
    both = multiplex(parts.forward, split.input_gradients)
    nodes = list(both.graph.nodes)
    starts = [node for node in nodes if is_start(node)]
    assert len(starts) == 4, "two exchanges there, two back"
    for start in starts:
        (wait,) = start.users
        assert is_wait(wait)
        between = nodes[nodes.index(start) : nodes.index(wait)]
        assert any(is_compute_bound(node) and node.meta[PART] != start.meta[PART] for node in between), start
    forward_inputs = [*layer.parameters(), x]
    backward_inputs = [example(node) for node in parts.backward.graph.nodes if node.op == "placeholder"]
    apart = [*parts.forward.forward(list(forward_inputs)), *split.input_gradients.forward(list(backward_inputs))]
    together = both.forward([*forward_inputs, *backward_inputs])
    for one, other in zip(together, apart):
        assert one is other is None or torch.equal(one, other)


def example(node: Node) -> Tensor:
    value = node.meta["val"]
    return torch.arange(value.numel(), dtype=value.dtype).view(value.shape) / value.numel()


@on_ranks(2)
def test_shards_are_gathered_once_and_reduced_once(rank: int) -> None:
    """Two replicas of one rank that exchanges tokens with itself: the collectives of the shards are taken out of the
    graph, those of the experts stay. Two microbatches have the gradients of torch's fully_shard that reduces after the
    second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "experts"))
    replicas, experts = mesh["replicas"].get_group(), mesh["experts"].get_group()
    torch.manual_seed(0)
    stage = Experts(experts)
    names = [name for name, _ in stage.named_parameters()]
    shards = [p.detach().chunk(2)[replicas.rank()].clone().requires_grad_() for p in stage.parameters()]
    torch.manual_seed(rank)
    batches = [torch.randn(SEQUENCE, BATCH, H, requires_grad=True) for _ in range(2)]

    def function(*flat: Tensor) -> tuple[Tensor, ...]:
        wholes = [all_gather_tensor_autograd(shard, 0, replicas) for shard in flat[:-1]]
        return (torch.func.functional_call(stage, dict(zip(names, wholes)), flat[-1:]),)

    sharded = split_fsdp_collectives(trace_joint(function, [*shards, batches[0]], "a test"))
    assert sharded.sharded == sharded.reduced == tuple(range(len(names)))
    parts = partition(sharded.joint, len(names))
    with torch.no_grad():
        wholes = list(sharded.unshard.forward(list(shards)))
        totals = [torch.zeros_like(whole) for whole in wholes]
        found = []
        for x in batches:
            inputs = [*wholes, x]
            output, *saved = parts.forward.forward(list(inputs))
            grads = parts.backward.forward([*(inputs[n] for n in parts.read), *saved, output])
            totals = [total + grad for total, grad in zip(totals, grads)]
            found.append(grads[-1])
        found += sharded.reduce_grad.forward(totals)
    fully_shard(stage, mesh=mesh["replicas"])
    for number, x in enumerate(batches):
        stage.set_requires_gradient_sync(number == 1)
        output = stage(x)
        output.backward(output.detach())
    expected = [x.grad for x in batches] + [2 * p.grad.to_local() for p in stage.parameters()]  # it takes means
    assert all(map(torch.equal, found, expected))
