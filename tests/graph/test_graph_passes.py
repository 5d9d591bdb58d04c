"""Graphs that communicate: a forward and a backward in one."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.against import Received, assert_same_gradients, step
from tools.graphs import skip_without_tracer
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.fx import Node

from megapipe import StageInfo, parallel_state, stages_for_rank
from megapipe.graph import capture, multiplex, split_di_dw
from megapipe.graph.multiplexing import PART
from megapipe.graph.nodes import is_compute_bound, is_start, is_wait
from megapipe.overlap import start_all_to_all

skip_without_tracer()

H, SEQUENCE, BATCH = 8, 4, 2


class Experts(nn.Module):
    """Each of two ranks sends half of its tokens to the other's expert, and back."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.attention, self.up, self.down, self.shared = (nn.Linear(H, H) for _ in range(4))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.attention(x.flatten(0, 1)).relu()
        splits = [len(tokens) // 2] * 2
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
