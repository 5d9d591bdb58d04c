"""Losses per token, and sequences cut into slices: what is right, and mistakes that are made with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed import all_reduce

import megapipe
from megapipe import PipelineConfig, StageInfo, divide_by_num_tokens, parallel_state, slices
from megapipe.overlap import in_segments
from megapipe.proving import toy


def data_of(number: int) -> list[tuple[Tensor, Tensor]]:
    """Of which some labels do not count, in each microbatch another number."""
    generator = torch.Generator().manual_seed(0)
    shares = torch.linspace(0.3, 0.9, number)
    return [
        (tokens, torch.where(torch.rand(labels.shape, generator=generator) < share, labels, -100))
        for share, (tokens, labels) in zip(shares, toy.microbatches(number))
    ]


def sums_over_tokens(data: Iterator[Any], chunk: Any, scale: Any = lambda count, chunk: 1.0) -> tuple[Any, Any]:
    tokens, labels = (slices.cut(one, 1) for one in next(data))
    count = (labels >= 0).sum()

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss * scale(count, chunk), count, {"loss": loss.detach()}

    return in_segments(chunk, tokens), loss_func


def prove(number: int = 5, **arguments: Any) -> Any:
    config = PipelineConfig(calculate_per_token_loss=True)
    defaults = {"make_stage": toy.make_stage_of(5), "forward_step": sums_over_tokens, "pp_size": 2, "config": config}
    return megapipe.prove(**{"data": data_of(number), **defaults, **arguments})


def cut(num_slices: int, **settings: Any) -> dict[str, Any]:
    config = PipelineConfig(num_sequence_slices=num_slices, **settings)
    return {"config": config, "options": {"seq_length": toy.LENGTH, "micro_batch_size": 2}, "schedule": "seq1f1b"}


@on_ranks(2)
def test_sequences_in_slices(rank: int) -> None:
    """Microbatches count alike, or tokens. Forwards are given in segments, which the whole model took for outputs."""
    for per_token in (False, True):
        proof = prove(3, **cut(3, calculate_per_token_loss=per_token))
        assert proof, proof
        assert proof.same["loss"] == (6, 6)


def trained_by(finish: Callable[..., None] | None) -> Callable[..., Any]:
    def train_step(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        optimizer.zero_grad()
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = finish
        reports = megapipe.get_forward_backward_func("1f1b")(
            forward_step_func=sums_over_tokens,
            data_iterator=iter(microbatches),
            model=chunks,
            num_microbatches=len(microbatches),
        )
        optimizer.step()
        return reports

    return train_step


def divided_alone(models: list[nn.Module], num_tokens: Tensor | None) -> None:
    """Gradients by the tokens of this replica, and averaged then."""
    stages, replicas = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_data_parallel_group()
    divide_by_num_tokens(models, num_tokens, stages)
    for parameter in (p for model in models for p in model.parameters()):
        all_reduce(parameter.grad, group=replicas)


def of_each_microbatch(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    return sums_over_tokens(data, chunk, lambda count, chunk: 1 / count if getattr(chunk, "info", None) else 1.0)


@on_ranks(2)
def test_gradients_that_are_not_divided_by_tokens(rank: int) -> None:
    number = sum(int((labels >= 0).sum()) for _, labels in data_of(5))
    (text,) = prove(train_step=trained_by(None)).mistakes
    assert text.startswith(f"gradients are {number} times too large, by the number of tokens: losses are sums over")
    # What gradient accumulation did in many trainers (transformers#34191): short microbatches counted as much.
    (text,) = prove(forward_step=of_each_microbatch).mistakes
    assert text.startswith("gradients are divided by the tokens of each microbatch by itself, so that tokens of one")


@on_ranks(4)
def test_means_over_all_tokens(rank: int) -> None:
    proof = prove(6, num_replicas=2)
    assert proof, proof
    (text,) = prove(6, num_replicas=2, train_step=trained_by(divided_alone)).mistakes
    assert text.startswith("gradients are divided by the tokens of each replica by itself")


class Forgetful(nn.Module):
    """Adds to each position the one before it in its slice."""

    def forward(self, x: Tensor) -> Tensor:
        return x + F.pad(x, (0, 0, 1, 0))[:, :-1]


def with_layers(change: Callable[[Any], None]) -> Callable[[StageInfo], nn.Module]:
    def make_stage(info: StageInfo) -> nn.Module:
        net = toy.Layers(info, 5)
        for layer in net.layers.values():
            change(layer)
        return net

    return make_stage


@on_ranks(2)
def test_mistakes_with_slices(rank: int) -> None:
    """Of a layer that forgets earlier slices, the pipeline computes what one process does by the same slices, so only
    whole sequences show it."""

    def forget(layer: Any) -> None:
        layer.down = nn.Sequential(layer.down, Forgetful())

    def drop(layer: Any) -> None:
        layer.down = nn.Sequential(layer.down, nn.Dropout(0.5))

    proof = prove(3, make_stage=with_layers(forget), **cut(2))
    assert not proof.differences
    assert proof.mistakes[0].startswith("slices: gradients of microbatch 0 are off by ")
    assert "a layer looks back, and does not get what earlier slices have" in proof.mistakes[0]
    text = " ".join(prove(3, make_stage=with_layers(drop), **cut(2)).mistakes)
    assert "dropout, or other random numbers: layers." in text


def test_a_config_that_no_stage_takes() -> None:
    """It would have been passed over."""

    def with_its_own(info: StageInfo) -> nn.Module:
        return megapipe.PipelineStage(toy.Layers(info, 5), info)

    (text,) = prove(3, make_stage=with_its_own).mistakes
    assert "ValueError: stage " in text
    assert "has a config of its own" in text
