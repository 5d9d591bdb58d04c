"""A small model that can be cut into stages anywhere, its data, and the run that everything is compared with: the
unpartitioned model, plain PyTorch, microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.utils.checkpoint import checkpoint

import megapipe
from megapipe import PipelineConfig, StageInfo, distribute_layers, parallel_state, stages_for_rank, weight_grad
from megapipe.p2p_communication import Communicator
from megapipe.placement import loop

HIDDEN, VOCABULARY, SEQUENCE, BATCH = 16, 11, 5, 2


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Stage(nn.Module):
    """The layers of one stage; the unpartitioned model is the only stage of one. Parameters keep global names.

    Args:
        deferred: the layers put their weight gradients off where the schedule wants it.
        recompute: activations of each layer are recomputed in the backward.
    """

    def __init__(
        self,
        info: StageInfo,
        num_layers: int,
        dropout: float = 0.0,
        deferred: bool = False,
        recompute: bool = False,
        **config: Any,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        self.recompute = recompute
        self.config = SimpleNamespace(hidden_size=HIDDEN, **config)
        self.info = info
        self.layers = nn.ModuleDict()
        for layer in distribute_layers(num_layers, info):
            torch.manual_seed(100 + layer)
            self.layers[str(layer)] = Block(dropout)
        torch.manual_seed(99)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN) if info.is_first else None
        torch.manual_seed(98)
        self.head = nn.Linear(HIDDEN, VOCABULARY) if info.is_last else None
        self.input_tensor: Tensor | None = None
        if deferred:
            weight_grad.convert(self)

    def set_input_tensor(self, input_tensor: list[Tensor]) -> None:
        self.input_tensor = input_tensor[0]

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        x = self.input_tensor if self.embedding is None else self.embedding(tokens)
        for name, layer in self.layers.items():
            if self.dropout:
                torch.manual_seed(1000 * seed + int(name))  # dropout draws alike wherever the layer runs
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return x if self.head is None else self.head(x)


def batches(num_microbatches: int, seed: int = 0, seq_lengths: list[int] | None = None) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    for microbatch in range(num_microbatches):
        seq_length = seq_lengths[microbatch] if seq_lengths else SEQUENCE
        text = torch.randint(VOCABULARY, (seq_length + 1, BATCH), generator=generator)
        yield {"tokens": text[:-1], "labels": text[1:], "seed": 100 * seed + microbatch}


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def forward_step(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = loss_of(output, batch["labels"])
        return loss, {"loss": loss.detach()}

    return model(batch["tokens"], batch["seed"]), loss_func


def build(schedule: str, pp_size: int, num_layers: int, num_chunks: int | None = None, **options: Any) -> list[Stage]:
    """This rank's chunks."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=pp_size)
    return [Stage(info, num_layers, **options) for info in stages_for_rank(schedule, num_chunks=num_chunks)]


def run(schedule: str, model: Any, num_microbatches: int, **options: Any) -> list[Any]:
    """One step of the schedule."""
    seed = options.pop("seed", 0)
    arguments = {
        "forward_step_func": forward_step,
        "data_iterator": batches(num_microbatches, seed),
        "seq_length": SEQUENCE,
        "micro_batch_size": BATCH,
    }
    function = megapipe.get_forward_backward_func(schedule)
    return function(model=model, num_microbatches=num_microbatches, **{**arguments, **options})


def reference(
    num_layers: int, num_microbatches: int, seeds: tuple[int, ...] = (0,), dropout: float = 0.0, deferred: bool = False
) -> tuple[Stage, list[Tensor]]:
    """The unpartitioned model after one step per seed, with its gradients, and the losses of the last step."""
    model = Stage(StageInfo(0, 1), num_layers, dropout, deferred)
    for seed in seeds:
        losses = []
        for batch in batches(num_microbatches, seed):
            loss = loss_of(model(batch["tokens"], batch["seed"]), batch["labels"])
            losses.append(loss.detach())
            (loss / num_microbatches).backward()
    return model, losses


def assert_same_gradients(chunks: list[Stage], expected: nn.Module) -> None:
    """Bit for bit. Where the reference has none, there must be none."""
    parameters = dict(expected.named_parameters())
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            want = parameters[name].grad
            if want is None:
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None, f"{name} has no gradient"
                assert torch.equal(parameter.grad, want), f"{name}: {(parameter.grad - want).abs().max()}"


def assert_same_losses(reports: list[Any], expected: list[Tensor], chunks: list[Stage]) -> None:
    """On the rank of the last stage, in microbatch order."""
    if any(chunk.info.is_last for chunk in chunks):
        assert [report["loss"] for report in reports] == expected
    else:
        assert reports == []


def communicator(rank: int, pp_size: int) -> Communicator:
    """The channels of a pipeline with one chunk per rank."""
    return Communicator(
        dist.PrefixStore("communicator", _get_default_store()), rank, pp_size, loop, 1, torch.device("cpu"), False, 60
    )


__all__ = [name for name in dir() if not name.startswith("_")] + ["PipelineConfig"]
