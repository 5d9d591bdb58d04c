"""A tensor-parallel GPT in a pipeline of replicas: attention by heads, sequence and loss parallelism, and windows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.ranks import RankPool
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import megapipe
from megapipe import StageInfo, clip_grad_norm_, parallel_state, stages_for_rank
from megapipe.training import GradientReducer
from megapipe.weight_grad import convert

HIDDEN, HEAD, VOCABULARY, SEQUENCE, BATCH, NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 16, 4, 12, 6, 2, 4, 6, 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        by_head = [linear(normed).unflatten(-1, (-1, HEAD)).permute(1, 2, 0, 3) for linear in (self.q, self.k, self.v)]
        attended = F.scaled_dot_product_attention(*by_head, is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(-2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, info: StageInfo, config: Any = None) -> None:
        super().__init__()
        self.info, self.config, self.received = info, config, None
        self.layers = nn.ModuleDict()
        for number in megapipe.distribute_layers(NUM_LAYERS, info):
            torch.manual_seed(number)
            self.layers[str(number)] = Block()
        torch.manual_seed(100)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        torch.manual_seed(101)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False) if info.is_last else None

    def set_input_tensor(self, received: list[Tensor | None]) -> None:
        self.received = received[0]

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.received if self.embedding is None else self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def parallelize(model: GPT, mesh: Any) -> GPT:
    column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    for layer in model.layers.values():
        norm = SequenceParallel(sequence_dim=0)
        plan = {"attention_norm": norm, "mlp_norm": norm, "out": row, "down": row}
        parallelize_module(layer, mesh, plan | dict.fromkeys(("q", "k", "v", "up"), column))
    if model.embedding is not None:
        parallelize_module(model.embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)))
    if model.head is not None:
        style = ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model.head, mesh, style)
    return model


def texts(step: int, replica: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2 * step + replica)
    return [torch.randint(VOCABULARY, (SEQUENCE + 1, BATCH), generator=generator) for _ in range(NUM_MICROBATCHES)]


def loss_of(logits: Tensor, text: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), text[1:].flatten())


def forward_step(iterator: Any, chunk: GPT) -> Any:
    text = next(iterator)
    return chunk(text[:-1]), lambda logits: ((loss := loss_of(logits, text)), loss.detach())


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank: int, schedule: str) -> None:
    """pp=2 x tp=2 x dp=2, against one rank that trains the whole model on the batches of both replicas."""
    parallel_state.destroy_model_parallel()
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    parallel_state.initialize_from_mesh(mesh)
    reference = GPT(StageInfo(0, 1))
    sizes = {"hidden_size": HIDDEN, "sequence_parallel": True, "tensor_model_parallel_size": 2}
    config = SimpleNamespace(**sizes, min_pending_weights=1)
    chunks = [convert(parallelize(GPT(info, config), mesh["tp"])) for info in stages_for_rank(schedule)]
    reducer = GradientReducer(chunks)
    config.grad_sync_func, config.finalize_model_grads_func = reducer.start, reducer.finish
    parameters = [p for chunk in chunks for p in chunk.parameters()]
    optimizers = [torch.optim.SGD(of, lr=0.1, foreach=False) for of in (reference.parameters(), parameters)]
    for step in range(NUM_STEPS):
        for replica in range(2):
            for text in texts(step, replica):
                (loss_of(reference(text[:-1]), text) / NUM_MICROBATCHES / 2).backward()
        with loss_parallel():
            megapipe.get_forward_backward_func(schedule)(
                forward_step_func=forward_step,
                data_iterator=iter(texts(step, mesh["dp"].get_local_rank())),
                model=chunks,
                num_microbatches=NUM_MICROBATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=BATCH,
            )
        norm = clip_grad_norm_(chunks, 1.0)
        torch.testing.assert_close(norm.float(), nn.utils.clip_grad_norm_(reference.parameters(), 1.0))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            torch.testing.assert_close(
                whole(parameter.detach()), reference.get_parameter(name).detach(), atol=1e-6, rtol=0
            )


@pytest.mark.soak
@pytest.mark.parametrize(
    "schedule", ["1f1b", "interleaved_1f1b", "zbv", "interleaved_zb1p", "dualpipev", "combined_zb1p"]
)
def test_trains_as_on_one_rank(eight_ranks: RankPool, schedule: str) -> None:
    eight_ranks.run(8, train, schedule)
