"""Replicas of a pipeline, each with data of its own, and the one process that they are compared with: it computes the
gradients of each replica one after the other, and averages them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from tools.against import assert_close, assert_same_gradients
from tools.models import Stage, add_gradients, build, run
from torch import Tensor, nn

from megapipe import StageInfo, parallel_state
from megapipe.training import GradientReducer

NUM_LAYERS, NUM_MICROBATCHES, NUM_STEPS = 4, 2, 2
SPLIT = ["zb1p", "zb2p", "interleaved_zb1p", "combined_zb1p", "zbv", "v_half", "v_min", "dualpipev"]


def adamw(chunks: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2, weight_decay=0.1)


class LocalAdamW:
    """The same on the shards themselves: torch takes a second to find out how to run it on DTensors of new shapes."""

    def __init__(self, chunks: Any) -> None:
        self._parameters = [p for chunk in chunks for p in chunk.parameters()]
        self._shards = [p.detach().to_local() for p in self._parameters]
        self._optimizer = torch.optim.AdamW(self._shards, lr=1e-2, weight_decay=0.1)

    def step(self) -> None:
        for parameter, shard in zip(self._parameters, self._shards):
            shard.grad = parameter.grad.to_local()
        self._optimizer.step()

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def replica_gradients(model: nn.Module, replica: int, num_replicas: int, step: int, m: int) -> list[Tensor | None]:
    model.zero_grad()
    add_gradients(model, m, num_replicas * step + replica)
    return [p.grad for p in model.parameters()]


def average(gradients: list[list[Tensor | None]]) -> list[Tensor | None]:
    """Over replicas, as they would be added: a replica that has none counts as zeros."""
    averaged: list[Tensor | None] = []
    for grads in zip(*gradients):
        some = [grad for grad in grads if grad is not None]
        averaged.append(sum(some[1:], some[0].clone()) / len(grads) if some else None)
    return averaged


@functools.cache
def reference(num_replicas: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Of every step the gradients, and the parameters at the end."""
    model = Stage(StageInfo(0, 1), NUM_LAYERS)
    optimizer = adamw([model])
    gradients = []
    for step in range(NUM_STEPS):
        all_replicas = [
            replica_gradients(model, replica, num_replicas, step, NUM_MICROBATCHES) for replica in range(num_replicas)
        ]
        for parameter, grad in zip(model.parameters(), average(all_replicas)):
            parameter.grad = grad
        optimizer.step()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def train_and_compare(
    schedule: str,
    chunks: list[Stage],
    atol: float = 0.0,
    optimizer_of: Callable[[Any], Any] = adamw,
) -> None:
    """Gradients and parameters of every step are those of the reference."""
    num_replicas = parallel_state.get_data_parallel_world_size()
    gradients, final = reference(num_replicas)
    optimizer = None
    for step in range(NUM_STEPS):
        seed = num_replicas * step + parallel_state.get_data_parallel_rank()
        run(schedule, chunks, NUM_MICROBATCHES, seed=seed)
        optimizer = optimizer or optimizer_of(chunks)  # FSDP2 may lay its shards out anew in the first forward
        assert_same_gradients(chunks, gradients[step], schedule, atol)
        optimizer.step()
        optimizer.zero_grad()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            assert_close(parameter, final[name], atol, f"{schedule}, {name}")


def reduced(chunks: list[Any], **options: Any) -> GradientReducer:
    """A GradientReducer that the schedules call."""
    reducer = GradientReducer(chunks, **options)
    for chunk in chunks:
        chunk.config.grad_sync_func, chunk.config.finalize_model_grads_func = reducer.start, reducer.finish
    return reducer


def build_replicas(schedule: str, pp_size: int, **options: Any) -> list[Stage]:
    return build(schedule, pp_size, NUM_LAYERS, deferred=schedule in SPLIT, **options)
