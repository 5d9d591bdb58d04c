"""A small model that can be cut into any number of stages, to run schedules with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import slices, weight_grad
from ..layouts import distribute_layers
from ..plan import Placement, StageInfo
from ..timing import LiveStorages

WIDTH, INNER, VOCABULARY, LENGTH, BATCH = 16, 512, 17, 16, 2
"""What a layer keeps for its backward is many times what stages send each other, so that held microbatches can be
counted in bytes."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Each position sees the one before it, so that slices need each other."""
        before = [last for (last,) in slices.earlier(self)] or [torch.zeros_like(x[:, :1])]
        slices.keep(self, x[:, -1:])
        x = x + 0.5 * torch.cat([before[-1], x[:, :-1]], 1)
        hidden: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + hidden


class Layers(nn.Module):
    """The layers of one stage. The whole model is the only stage of one: names are the same."""

    def __init__(self, info: StageInfo, num_layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if info.is_first else None
        self.layers = nn.ModuleDict({str(number): Layer() for number in distribute_layers(num_layers, info)})
        self.head = nn.Linear(WIDTH, VOCABULARY) if info.is_last else None

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def make_stage_of(num_layers: int, defers_weights: bool = False) -> Callable[[StageInfo], nn.Module]:
    """
    Args:
        num_layers: of the whole model.
        defers_weights: whether layers leave their weight gradients to W.
    """

    def make_stage(info: StageInfo) -> nn.Module:
        stage = Layers(info, num_layers)
        return weight_grad.convert(stage) if defers_weights else stage

    return make_stage


def microbatches(number: int, length: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (number, BATCH, length + 1), generator=generator)
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in text]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def forward_step(data_iterator: Iterator[tuple[Tensor, Tensor]], chunk: nn.Module) -> tuple[Any, Any]:
    tokens, labels = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor]:
        own = slices.cut(labels, 1)
        loss = loss_of(output, own) * (own.numel() / labels.numel())
        return loss, loss.detach()

    return chunk(slices.cut(tokens, 1)), loss_func


def bytes_of_microbatch(
    placement: Placement, rank: int, pp_size: int, num_chunks: int, num_layers: int
) -> tuple[int, int]:
    """What a rank holds of one microbatch between its forward and its backward, and what its gradients take."""
    (tokens, _), *_ = microbatches(1)
    held = gradients = 0
    for info in placement.stages(rank, pp_size, num_chunks):
        stage = Layers(info, num_layers)
        x = tokens if info.is_first else torch.zeros(BATCH, LENGTH, WIDTH, requires_grad=True)
        with LiveStorages() as live:
            output = stage(x)
            held += live.held + (0 if info.is_first else x.nbytes)
        del output
        gradients += sum(parameter.nbytes for parameter in stage.parameters())
    return held, gradients
