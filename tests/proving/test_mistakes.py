"""Mistakes that trainers have made without a word, planted: each is found, and said in the right sentence."""

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
        self.layers = nn.ModuleDict({str(k): Layer(dropout) for k in distribute_layers(3, info)})
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
    return getattr(chunk, "info", None) is not None


def with_output(change: Callable[[Tensor, Any], Tensor]) -> Callable[..., Any]:
    """A forward_step whose output is changed by a stage."""

    def step(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
        output, loss_func = forward_step(data, chunk)
        return change(output, chunk) if is_cut(chunk) else output, loss_func

    return step


def trained_by(
    change: Callable[[list[Any]], None] = lambda chunks: None, before: Callable[..., Any] = lambda *arguments: None
) -> Callable[..., Any]:
    """A trainer's step that does something with its gradients before the update, or with its arguments before all. The
    latter may give other microbatches."""

    def train_step(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        microbatches = before(chunks, optimizer, microbatches) or microbatches
        optimizer.zero_grad()
        reports = megapipe.get_forward_backward_func("1f1b")(
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
    defaults = {"make_stage": Net, "forward_step": forward_step, "data": data_of(), "pp_size": 2, "timeout": 20.0}
    proof = megapipe.prove(**{**defaults, **arguments})
    assert not proof
    return " ".join(proof.mistakes)


def test_nothing_is_found_where_all_is_right() -> None:
    proof = megapipe.prove(Net, forward_step, data=data_of(), pp_size=3)
    assert proof, proof
    assert proof.counts == "8 of 8 losses, 28 of 28 gradients, 28 of 28 weights"
    assert proof.notes == ["compared with the model as the only stage of one"]


class LastOnly(torch.autograd.Function):
    """Forgets what the backward of the microbatch before has added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chunk: Any) -> Tensor:
        ctx.chunk = chunk
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        for parameter in ctx.chunk.parameters():
            parameter.grad = None
        return grad, None


def scaled_on_each_stage(output: Tensor, chunk: Any) -> Tensor:
    if not chunk.info.is_last:
        output.register_hook(lambda grad: grad / M)
    return output


def detached_by_stage_1(output: Tensor, chunk: Any) -> Tensor:
    return output.detach() + 0 * output if chunk.info.index == 1 else output


def scaled_by(scale: float) -> Callable[..., Any]:
    return lambda data, chunk: forward_step(data, chunk, scale)


def without_masks_in_the_middle(data: Iterator[Any], chunk: Any) -> tuple[Any, Any]:
    batch = next(data)
    mask = batch["mask"] if not is_cut(chunk) or chunk.info.index != 1 else None
    return chunk(batch["tokens"], mask=mask), lambda output: ((loss := loss_of(output, batch["labels"])), loss.detach())


def drop(chunks: list[Any]) -> None:
    for name, parameter in (pair for chunk in chunks for pair in chunk.named_parameters()):
        if chunks[0].info.index == 1 and "linear.weight" in name:
            parameter.grad = None


def clear_on_stage_1(chunks: list[Any]) -> None:
    if chunks[0].info.index == 1:
        chunks[0].zero_grad()


def update_but_stage_1(chunks: list[Any], optimizer: Any, microbatches: Any) -> None:
    if chunks[0].info.index == 1:
        optimizer.step = lambda: None


def never_clear(chunks: list[Any], optimizer: Any, microbatches: Any) -> None:
    optimizer.zero_grad = lambda: None


def swap(chunks: list[Any], optimizer: Any, microbatches: Any) -> list[Any]:
    return [microbatches[number] for number in (1, 0, 2, 3)]


def average(scale: float) -> Callable[[list[Any]], None]:
    def change(chunks: list[Any]) -> None:
        group = parallel_state.get_data_parallel_group()
        for parameter in (p for chunk in chunks for p in chunk.parameters()):
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad *= scale

    return change


def hang(chunks: list[Any]) -> None:
    if dist.get_rank() > 0:
        dist.barrier()


def fail(chunks: list[Any]) -> None:
    if dist.get_rank() == 1:
        raise KeyError("no such thing")


TWO_REPLICAS = {"data": data_of(6), "num_replicas": 2}
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "only the last microbatch (Automodel#3530)": (
        {"forward_step": with_output(LastOnly.apply)},
        "gradients are those of microbatch 3 alone, the last: gradients are set anew, or cleared, in each backward.",
    ),
    "a loss divided on each stage (DeepSpeed#8154)": (
        {"forward_step": scaled_by(1 / M)},
        "0.25 of what they should be, 1 over the number of microbatches: the loss is divided by it twice",
    ),
    "a loss that is not divided": (
        {"forward_step": scaled_by(M)},
        "4 times too large, by the number of microbatches: the loss, or the gradient, is not divided by it",
    ),
    "a loss times the stages": (
        {"forward_step": scaled_by(3.0), "pp_size": 3},
        "3 times too large, by the number of stages",
    ),
    "a loss times anything": ({"forward_step": scaled_by(7.0)}, "7 times what they should be"),
    "a scale on each stage": (
        {"forward_step": with_output(scaled_on_each_stage), "pp_size": 3},
        "gradients are scaled by 0.25 once more on each stage further back",
    ),
    "weights that are not updated": (
        {"train_step": trained_by(before=update_but_stage_1)},
        "the weights of stage 1 are not updated, though their gradients are right",
    ),
    "gradients of the step before": (
        {"train_step": trained_by(before=never_clear)},
        "those of this step and of the step before: they are not cleared in between",
    ),
    "gradients that are dropped (torchtitan#2972)": (
        {"train_step": trained_by(drop), "pp_size": 3},
        "1 of 4 parameters of stage 1 have no gradient, such as layers.1.linear.weight: their weight-gradient pass (W) "
        "has not run, or they do not take part in the forward.",
    ),
    "a stage without a gradient": (
        {"train_step": trained_by(clear_on_stage_1)},
        "stage 1 has no gradient at all, though those before it have",
    ),
    "a gradient that does not get back": (
        {"forward_step": with_output(detached_by_stage_1), "pp_size": 3},
        "no gradient gets back to stages 0, 1: something between it and stage",
    ),
    "dropout that differs": ({"make_stage": lambda info: Net(info, 0.5)}, "dropout, or other random numbers: layers."),
    "a mask that middle stages miss": (
        {"forward_step": without_masks_in_the_middle, "pp_size": 3},
        "a mask, or another argument, that does not reach a stage: layers.1 (Layer) of stage 1 is called without mask, "
        "which is a tensor [2, 5] of float32 in the whole model, in microbatch 0. Pass it on every stage, or send it "
        "along.",
    ),
    "microbatches that are swapped": (
        {"train_step": trained_by(before=swap)},
        "losses are those of other microbatches, in the order [1, 0, 2, 3]",
    ),
    "replicas that are not averaged": (
        {**TWO_REPLICAS, "train_step": trained_by()},
        "those of its own replica alone: they are not averaged over replicas",
    ),
    "replicas that are added up": (
        {**TWO_REPLICAS, "train_step": trained_by(average(1.0))},
        "2 times too large, by the number of replicas or the number of stages: they are",
    ),
    "replicas that are averaged twice": (
        {**TWO_REPLICAS, "train_step": trained_by(average(0.25))},
        "0.5 of what they should be, 1 over the number of replicas or the",
    ),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@on_ranks()
def test_mistakes_are_said(rank: int, num_ranks: int) -> None:
    for name, (arguments, text) in MISTAKES.items():
        if num_ranks == arguments.get("pp_size", 2) * arguments.get("num_replicas", 1):
            assert text in said(**arguments), name
    if num_ranks == 4:
        assert megapipe.prove(Net, forward_step, pp_size=2, train_step=trained_by(average(0.5)), **TWO_REPLICAS)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (hang, ["it hangs: after 1 s rank", "test_mistakes.py:"]),
        (fail, ["rank 1 failed: KeyError: 'no such thing' (test_mistakes.py:"]),
    ],
)
def test_ranks_that_do_not_come_back(change: Callable[[list[Any]], None], texts: list[str]) -> None:
    """Of processes that `prove` has forked from this one."""
    found = said(train_step=trained_by(change), timeout=1.0)
    assert all(text in found for text in texts)


@pytest.mark.parametrize("num_ranks", [2, 3])
@on_ranks()
def test_tied_weights_that_are_not_summed(rank: int, num_ranks: int) -> None:
    torch.default_generator.manual_seed(0)
    whole = Net(StageInfo(0, 1), is_tied=True)

    def summed(chunks: list[Any], optimizer: Any, microbatches: Sequence[Any]) -> Any:
        tied = TiedWeights(chunks, ["embedding.weight", "head.weight"])
        return trained_by(tied.sum_gradients)(chunks, optimizer, microbatches)

    if num_ranks == 3:
        assert said(whole=whole, train_step=summed, pp_size=3).startswith("rounding: nothing is off by more than")
        return
    assert megapipe.prove(Net, forward_step, data=data_of(), whole=whole, train_step=summed, tolerance=1e-4)
    assert said(whole=whole).startswith(
        "a tie that is not summed: embedding.weight of stage 0 and head.weight of stage 1 are one weight in the whole "
        "model, and each has its own part of the gradient only."
    )


@on_ranks(2)
def test_names_that_the_whole_model_has_not(rank: int) -> None:
    def local(info: StageInfo) -> nn.Module:
        net = Net(info)
        net.layers = nn.ModuleDict({str(k): layer for k, layer in enumerate(net.layers.values())})
        return net

    proof = megapipe.prove(local, forward_step, data=data_of(), pp_size=2)
    assert proof
    assert proof.notes[0].startswith("compared with all stages, one after the other in one process")
    assert megapipe.prove(
        local, forward_step, data=data_of(), pp_size=2, whole=lambda: Net(StageInfo(0, 1)), name_of=shifted
    )


def shifted(name: str, info: StageInfo) -> str:
    """From the number of a layer in its stage to that in the whole model: the first stage has two."""
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
