"""Mistakes that trainers have made without a word, planted: each is found, and said in the right sentence.

Ranks are processes that `prove` forks from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import StageInfo, TiedWeights, distribute_layers, parallel_state

WIDTH, WORDS, LENGTH = 8, 11, 5
M = 4


class Layer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            x = x + (x * mask[..., None]).mean(1, keepdim=True)
        return x + self.drop(torch.tanh(self.linear(self.norm(x))))


class Net(nn.Module):
    """The layers of one stage, and the whole model as the only one."""

    def __init__(self, info: StageInfo, dropout: float = 0.0, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH) if info.is_first else None
        self.layers = nn.ModuleDict({str(k): Layer(dropout) for k in distribute_layers(6, info)})
        self.head = nn.Linear(WIDTH, WORDS, bias=False) if info.is_last else None
        if is_tied and info.num_stages == 1:
            assert self.head is not None
            assert self.embedding is not None
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers.values():
            x = layer(x, mask=mask)
        return x if self.head is None else self.head(x)


def data_of(number: int = M) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(WORDS, (number, 2, LENGTH + 1), generator=generator)
    return [{"tokens": t[:, :-1], "labels": t[:, 1:], "mask": (t[:, :-1] % 3 > 0).float()} for t in text]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def forward_step(data: Iterator[dict[str, Tensor]], chunk: Any, scale: float = 1.0) -> tuple[Any, Any]:
    batch = next(data)

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor]:
        loss = loss_of(output, batch["labels"])
        return loss * (scale if is_cut(chunk) else 1.0), loss.detach()

    return chunk(batch["tokens"], mask=batch["mask"]), loss_func


def is_cut(chunk: Any) -> bool:
    """In the pipeline, and not in the whole model, where mistakes are not made."""
    info = getattr(chunk, "info", None)
    return info is not None


def trained_by(change: Callable[[list[Any]], None], schedule: str = "1f1b") -> Callable[..., Any]:
    """A trainer's step that does something with its gradients before the update."""

    def train_step(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        optimizer.zero_grad()
        reports = megapipe.get_forward_backward_func(schedule)(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches),
            model=chunks,
            num_microbatches=len(microbatches),
        )
        change(chunks)
        optimizer.step()
        return reports

    return train_step


def said(**arguments: Any) -> str:
    """What is found, in a few seconds."""
    defaults = {"make_stage": Net, "forward_step": forward_step, "data": data_of(), "pp_size": 3, "timeout": 20.0}
    proof = megapipe.prove(**{**defaults, **arguments})
    assert not proof
    return " ".join(proof.mistakes)


def test_nothing_is_found_where_all_is_right() -> None:
    proof = megapipe.prove(Net, forward_step, data=data_of(), pp_size=3)
    assert proof, proof
    assert proof.counts == "8 of 8 losses, 52 of 52 gradients, 52 of 52 weights"
    assert proof.notes == ["compared with the model as the only stage of one"]


class LastOnly(torch.autograd.Function):
    """Forgets what the backward of the microbatch before has added up (Automodel#3530)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: Any) -> Tensor:
        ctx.chunk = chunk
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for parameter in ctx.chunk.parameters():
            parameter.grad = None
        return grad, None


def step_that_forgets(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    output, loss_func = forward_step(data, chunk)
    return LastOnly.apply(output, chunk) if is_cut(chunk) else output, loss_func


def test_only_the_last_microbatch() -> None:
    assert said(forward_step=step_that_forgets) == (
        "gradients are those of microbatch 3 alone, the last: gradients are set anew, or cleared, in each backward."
    )


@pytest.mark.parametrize(
    ("scale", "text"),
    [
        (1 / M, "0.25 of what they should be, 1 over the number of microbatches: the loss is divided by it twice"),
        (M, "4 times too large, by the number of microbatches: the loss, or the gradient, is not divided by it"),
        (3.0, "3 times too large, by the number of stages"),
        (7.0, "7 times what they should be"),
    ],
)
def test_a_loss_scaled_once_too_often(scale: float, text: str) -> None:
    """DeepSpeed#8154 divided it on each stage."""
    assert text in said(forward_step=lambda data, chunk: forward_step(data, chunk, scale))


def step_that_scales_on_each_stage(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    output, loss_func = forward_step(data, chunk)
    if is_cut(chunk) and not chunk.info.is_last:
        output.register_hook(lambda grad: grad / M)
    return output, loss_func


def test_a_scale_on_each_stage() -> None:
    assert "gradients are scaled by 0.25 once more on each stage further back" in said(
        forward_step=step_that_scales_on_each_stage
    )


def test_weights_of_a_stage_that_are_not_updated() -> None:
    def but_stage_1(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        if chunks[0].info.index == 1:
            optimizer.step = lambda: None
        return trained_by(lambda chunks: None)(chunks, optimizer, microbatches)

    assert "the weights of stage 1 are not updated, though their gradients are right" in said(train_step=but_stage_1)


def test_gradients_of_the_step_before() -> None:
    def never_clears(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        optimizer.zero_grad = lambda: None
        return trained_by(lambda chunks: None)(chunks, optimizer, microbatches)

    assert "those of this step and of the step before: they are not cleared in between" in said(train_step=never_clears)


def test_gradients_that_are_dropped() -> None:
    """torchtitan#2972 lost those of some parameters."""

    def drop(chunks: list[Any]) -> None:
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                if chunk.info.index == 1 and "linear.weight" in name:
                    parameter.grad = None

    assert said(train_step=trained_by(drop)) == (
        "2 of 8 parameters of stage 1 have no gradient, such as layers.2.linear.weight: their weight-gradient pass (W) "
        "has not run, or they do not take part in the forward."
    )


def test_a_stage_without_a_gradient() -> None:
    def clear(chunks: list[Any]) -> None:
        if chunks[0].info.index == 1:
            chunks[0].zero_grad()

    assert said(train_step=trained_by(clear)).startswith("stage 1 has no gradient at all, though those before it have")


def test_a_gradient_that_does_not_get_back() -> None:
    def detached(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        output, loss_func = forward_step(data, chunk)
        if is_cut(chunk) and chunk.info.index == 1:
            output = output.detach() + 0 * output
        return output, loss_func

    assert said(forward_step=detached).startswith(
        "no gradient gets back to stages 0, 1: something between it and stage"
    )


def test_tied_weights_that_are_not_summed() -> None:
    torch.default_generator.manual_seed(0)
    whole = Net(StageInfo(0, 1), is_tied=True)
    assert said(whole=whole).startswith(
        "a tie that is not summed: embedding.weight of stage 0 and head.weight of stage 2 are one weight in the whole "
        "model, and each has its own part of the gradient only."
    )

    def summed(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        tied = TiedWeights(chunks, ["embedding.weight", "head.weight"])
        return trained_by(lambda chunks: tied.sum_gradients(chunks))(chunks, optimizer, microbatches)

    arguments: dict[str, Any] = {"data": data_of(), "whole": whole, "train_step": summed, "pp_size": 3}
    assert megapipe.prove(Net, forward_step, **arguments, tolerance=1e-4)
    assert said(**arguments).startswith("rounding: nothing is off by more than")


def test_dropout_that_differs() -> None:
    text = said(make_stage=lambda info: Net(info, 0.5))
    assert text.startswith("dropout, or other random numbers: layers.")
    assert "draws others than in the whole model" in text


def step_without_masks_in_the_middle(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    batch = next(data)
    mask = batch["mask"] if not is_cut(chunk) or chunk.info.index != 1 else None
    return chunk(batch["tokens"], mask=mask), lambda output: ((loss := loss_of(output, batch["labels"])), loss.detach())


def test_a_mask_that_middle_stages_miss() -> None:
    assert said(forward_step=step_without_masks_in_the_middle) == (
        "a mask, or another argument, that does not reach a stage: layers.2 (Layer) of stage 1 is called without mask, "
        "which is a tensor [2, 5] of float32 in the whole model, in microbatch 0. Pass it on every stage, or send it "
        "along."
    )


def test_microbatches_that_are_swapped() -> None:
    def swapped(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        return trained_by(lambda chunks: None)(chunks, optimizer, [microbatches[k] for k in (1, 0, 2, 3)])

    assert "losses are those of other microbatches, in the order [1, 0, 2, 3]" in said(train_step=swapped)


def averaged(chunks: list[Any], scale: float) -> None:
    group = parallel_state.get_data_parallel_group()
    for parameter in (p for chunk in chunks for p in chunk.parameters()):
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad *= scale


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda chunks: averaged(chunks, 0.5), ""),
        (lambda chunks: None, "those of its own replica alone: they are not averaged over replicas"),
        (
            lambda chunks: averaged(chunks, 1.0),
            "2 times too large, by the number of replicas or the number of stages: they are",
        ),
        (lambda chunks: averaged(chunks, 0.25), "0.5 of what they should be, 1 over the number of replicas or the"),
    ],
)
def test_replicas(change: Any, text: str) -> None:
    arguments: dict[str, Any] = {"data": data_of(6), "num_replicas": 2, "pp_size": 2, "train_step": trained_by(change)}
    if text:
        assert text in said(**arguments)
    else:
        assert megapipe.prove(Net, forward_step, **arguments)


def test_a_trainer_that_hangs() -> None:
    def one_rank_too_few(chunks: list[Any]) -> None:
        if dist.get_rank() > 0:
            dist.barrier()

    text = said(train_step=trained_by(one_rank_too_few), timeout=3.0)
    assert text.startswith("it hangs: after 3 s rank")
    assert "test_mistakes.py:" in text


def test_a_rank_that_fails() -> None:
    def fails(chunks: list[Any]) -> None:
        if dist.get_rank() == 1:
            raise KeyError("no such thing")

    text = said(train_step=trained_by(fails))
    assert text.startswith("rank 1 failed: KeyError: 'no such thing' (test_mistakes.py:")


def test_names_that_the_whole_model_has_not() -> None:
    def local(info: StageInfo) -> nn.Module:
        net = Net(info)
        net.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(net.layers.values())})
        return net

    proof = megapipe.prove(local, forward_step, data=data_of(), pp_size=3)
    assert proof
    assert proof.notes[0].startswith("compared with all stages, one after the other in one process")
    assert megapipe.prove(
        local, forward_step, data=data_of(), pp_size=3, whole=lambda: Net(StageInfo(0, 1)), name_of=shifted
    )


def shifted(name: str, info: StageInfo) -> str:
    """From the number of a layer in its stage to that in the whole model: each stage has two."""
    kind, _, rest = name.partition(".")
    number, _, rest = rest.partition(".")
    return f"layers.{int(number) + 2 * info.index}.{rest}" if kind == "layers" else name


@on_ranks(2)
def test_random_numbers_go_on_as_before(rank: int) -> None:
    """Ranks drew others after a proof: the first one, which has the whole model, was left with another seed."""
    torch.default_generator.manual_seed(7)
    wanted = torch.rand(3)
    torch.default_generator.manual_seed(7)
    assert not megapipe.prove(Net, lambda data, chunk: forward_step(data, chunk, 7.0), data=data_of())
    assert torch.equal(torch.rand(3), wanted)
