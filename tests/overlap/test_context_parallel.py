"""Attention over sequences that are shared out among ranks, in overlap windows: keys and values are gathered, or heads
exchanged for parts of the sequence."""

from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.against import add_gradients, step, unlabelled
from tools.models import noting_products
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import parallel_state, stages_for_rank
from megapipe.overlap import in_segments, run_segments, start_all_gather, start_all_to_all
from megapipe.weight_grad import convert

HIDDEN, HEADS, SEQUENCE, NUM_LAYERS, NUM_MICROBATCHES = 8, 2, 12, 4, 5


class Layer(nn.Module):
    """[sequence / ranks, batch, hidden] of this rank to the same. `group` None: it has the whole sequence."""

    def __init__(self, number: int, group: Any) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.group = group
        self.norm = nn.LayerNorm(HIDDEN)
        self.keys_and_values, self.queries = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        normed = self.norm(x)
        pending = start_all_gather(self.keys_and_values(normed), self.group)
        queries = self.queries(normed)  # while the others' keys and values are on their way
        yield
        keys, values = pending.wait().chunk(2, -1)
        rank = 0 if self.group is None else self.group.rank()
        rows = torch.arange(len(x)) + rank * len(x)
        mask = torch.arange(len(keys)) <= rows.unsqueeze(1)
        by_head = [t.unflatten(-1, (HEADS, -1)).permute(1, 2, 0, 3) for t in (queries, keys, values)]
        attended = F.scaled_dot_product_attention(*by_head, attn_mask=mask)
        return x + self.out(attended.permute(2, 0, 1, 3).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


class Exchanging(Layer):
    """Each rank attends over the whole sequence with some of the heads (https://arxiv.org/abs/2309.14509)."""

    def exchange(self, to_each: Tensor) -> Any:
        """[ranks, rows, batch, width], the part for each rank, to the part from each, one below the other."""
        rows = [to_each.shape[1]] * len(to_each)
        return start_all_to_all(to_each.flatten(0, 1), rows, rows, self.group)

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        normed, ranks = self.norm(x), 1 if self.group is None else self.group.size()
        keys, values = self.keys_and_values(normed).chunk(2, -1)
        of_heads = [t.chunk(ranks, -1) for t in (self.queries(normed), keys, values)]
        pending = self.exchange(torch.stack([torch.cat(of_rank, -1) for of_rank in zip(*of_heads)]))
        yield
        by_head = [t.unflatten(-1, (HEADS // ranks, -1)).permute(1, 2, 0, 3) for t in pending.wait().chunk(3, -1)]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True).permute(2, 0, 1, 3).flatten(-2)
        pending = self.exchange(attended.unflatten(0, (ranks, -1)))
        yield
        return x + self.out(torch.cat(pending.wait().chunk(ranks), -1))


class Stage(nn.Module):
    def __init__(self, kind: type[Layer], layers: range, group: Any, config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): kind(number, group) for number in layers})
        self.config, self.received = config, None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        x = x if self.received is None else self.received
        for layer in self.layers.values():
            x = yield from in_segments(layer, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))


def loss_of(output: Tensor, target: None) -> Tensor:
    return output.sin().sum()


@pytest.mark.parametrize(("kind", "schedule", "in_parts"), [(Layer, "zbv", False), (Exchanging, "combined_zb1p", True)])
@on_ranks(4)
def test_equal_to_the_whole_sequence(rank: int, kind: type[Layer], schedule: str, in_parts: bool) -> None:
    """pp=2 x cp=2. A forward that does not yield has windows where it waits, all the same."""
    parallel_state.initialize_model_parallel(2)  # replicas, whose gradients are added up, share sequences out
    group, own = parallel_state.get_data_parallel_group(), parallel_state.get_data_parallel_rank()
    data = torch.randn(NUM_MICROBATCHES, SEQUENCE, 2, HIDDEN, generator=torch.Generator().manual_seed(0))
    whole = Stage(Layer, range(NUM_LAYERS), None, None)
    add_gradients([whole], unlabelled(data), loss_of)
    config = SimpleNamespace(hidden_size=HIDDEN, context_parallel_size=2, min_pending_weights=1)
    infos = stages_for_rank(schedule)
    chunks = [convert(Stage(kind, megapipe.distribute_layers(NUM_LAYERS, info), group, config)) for info in infos]
    with noting_products() as products:
        sizes = {"seq_length": SEQUENCE, "micro_batch_size": 2}
        step(schedule, chunks, unlabelled(data.chunk(2, 1)[own]), loss_of, in_parts=in_parts, **sizes)
    assert any(products)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            # As in Megatron, losses are multiplied by context_parallel_size: replicas are averaged.
            torch.distributed.all_reduce(parameter.grad, group=group)
            torch.testing.assert_close(parameter.grad / 2, whole.get_parameter(name).grad, rtol=1e-5, atol=1e-6)
