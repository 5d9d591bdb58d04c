"""An embedding that is also the head, wherever the two stages are; and gradients divided by the number of tokens."""

from __future__ import annotations

import copy
import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.against import assert_same_gradients
from tools.models import BATCH, SEQUENCE, Stage, add_gradients, batches, build, run
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import megapipe
from megapipe import PipelineError, StageInfo, TiedWeights, divide_by_num_tokens, parallel_state

NAMES = ["embedding.weight", "head.weight"]
NUM_LAYERS, M = 4, 3


@functools.cache
def unpartitioned() -> Stage:
    """With its gradients, those of the two copies summed. Only to be read."""
    model = Stage(StageInfo(0, 1), NUM_LAYERS)
    model.head.weight.data.copy_(model.embedding.weight.data)
    add_gradients(model, M)
    model.embedding.weight.grad = model.head.weight.grad = model.embedding.weight.grad + model.head.weight.grad
    return model


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
@on_ranks(2)
def test_one_copy_is_frozen_later(rank: int, schedule: str) -> None:
    """The other's rank waited for ever; on one rank the copies grew apart. Frozen together they stay as they are."""
    chunks = build(schedule, 2, NUM_LAYERS)
    TiedWeights(chunks, NAMES).sum_in_steps(chunks)
    run(schedule, chunks, M)
    for chunk in chunks:
        chunk.requires_grad_(False)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(name not in NAMES)
        chunk.zero_grad()
    run(schedule, chunks, M)
    if chunks[0].embedding is not None:
        chunks[0].embedding.requires_grad_(True)
    what = r"1 of the 2 copies of embedding.weight, head.weight, one tied weight, are frozen"
    has_none = schedule == "zbv" and rank == 1  # and hears of it in the next step
    with pytest.raises((PipelineError, ValueError), match=what) if not has_none else nullcontext():
        run(schedule, chunks, M)


@on_ranks(2)
def test_steps_sum_by_themselves(rank: int) -> None:
    """Whatever the config finalizes gradients by; tests/cases has a function of the user's own."""
    chunks = build("1f1b", 2, NUM_LAYERS)
    tied = TiedWeights(chunks, NAMES)
    tied.sum_in_steps(chunks)
    for finalize in (tied.sum_gradients, None):
        chunks[0].zero_grad()
        chunks[0].config.finalize_model_grads_func = finalize
        run("1f1b", chunks, M)
        assert_same_gradients(chunks, unpartitioned(), "1f1b")
    chunks[0].zero_grad()
    chunks[0].tied_weights.clear()
    run("1f1b", chunks, M)
    own = chunks[0].head.weight if rank else chunks[0].embedding.weight
    assert not torch.equal(own.grad, unpartitioned().head.weight.grad)


@on_ranks(2)
def test_copies_of_chunks(rank: int) -> None:
    """Chunks could not be copied, as averages of the weights are. In a V each copy had a sum of its own, of weights
    that were not trained, and the two weights grew apart."""
    schedule = "zbv"
    chunks = build(schedule, 2, NUM_LAYERS)
    TiedWeights(chunks, NAMES).sum_in_steps(chunks)
    copies = [torch.optim.swa_utils.AveragedModel(chunk).module for chunk in chunks]
    run(schedule, copies, M, forward_only=True)
    run(schedule, chunks, M)
    assert_same_gradients(chunks, unpartitioned(), schedule)
    TiedWeights(copies, NAMES).sum_in_steps(copies)
    run(schedule, copies, M)
    assert_same_gradients(copies, unpartitioned(), schedule)
    copies = copy.deepcopy(chunks)
    with pytest.raises((PipelineError, ValueError), match="a tied weight, is not that of the chunks of this step"):
        run(schedule, copies, M)


@on_ranks(2)
def test_copies_that_are_laid_out_otherwise(rank: int) -> None:
    """Their memory was broadcast and added up as it lay: weights and gradients of other elements."""
    parallel_state.initialize_model_parallel(2)
    value = torch.arange(6.0).view(2, 3)
    chunk = nn.Module()
    chunk.register_parameter(str(rank), nn.Parameter(torch.randn(3, 2).t() if rank else torch.randn(2, 5)[:, 1:4]))
    (weight,) = chunk.parameters()
    if rank == 0:
        weight.data.copy_(value)
    tied = TiedWeights([chunk], ["0", "1"])
    assert torch.equal(weight, value)
    for _ in range(2):
        weight.grad = torch.empty_like(weight).copy_(value * (rank + 1))
        tied.sum_gradients()
        assert torch.equal(weight.grad, 3 * value)


@on_ranks(2)
def test_a_sparse_gradient_is_refused(rank: int) -> None:
    """Torch's error was of a memory format, and named no weight."""
    chunks = build("1f1b", 2, NUM_LAYERS)
    TiedWeights(chunks, NAMES).sum_in_steps(chunks)
    if rank == 0:
        chunks[0].embedding.sparse = True
    with pytest.raises((PipelineError, TypeError), match=r"gradient of embedding.weight, a tied weight, is sparse"):
        run("1f1b", chunks, M)


@on_ranks(2)
def test_shards_whose_gradients_are_whole_meanwhile(rank: int) -> None:
    """A validation between two calls shards parameters. Their sum was then counted once for each copy."""
    chunks = build("1f1b", 2, NUM_LAYERS)
    TiedWeights(chunks, NAMES).sum_in_steps(chunks)
    fully_shard(chunks[0], mesh=DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu"))
    for is_last in (False, True):
        chunks[0].set_requires_gradient_sync(is_last)
        chunks[0].set_reshard_after_backward(is_last)
        run("1f1b", chunks, M)
        run("1f1b", chunks, M, forward_only=True)
    own = chunks[0].head.weight if rank else chunks[0].embedding.weight
    torch.testing.assert_close(own.grad.full_tensor(), 2 * unpartitioned().head.weight.grad)


@pytest.mark.parametrize("schedule", ["zbv", "no_pipelining"])
@on_ranks(1)
def test_one_parameter_under_two_names(rank: int, schedule: str) -> None:
    """Of one chunk or two: nothing to sum."""
    chunks = build(schedule, 1, NUM_LAYERS)
    weight = chunks[-1].head.weight = chunks[0].embedding.weight
    tied = TiedWeights(chunks, NAMES)
    run(schedule, chunks, M)
    before = weight.grad.clone()
    tied.sum_gradients()
    assert torch.equal(weight.grad, before)
    assert not hasattr(weight, "shared")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["embedding.weight", "haed.weight"], r"'haed\.weight' is on no stage"),
        (
            ["embedding.weight", "head.bias"],
            r"embedding\.weight is float32\[11, 16\] on pipeline rank 0; head\.bias is float32\[11\] on .* rank 1",
        ),
    ],
)
@on_ranks(2)
def test_what_cannot_be_tied_is_refused_on_every_rank(rank: int, names: list[str], message: str) -> None:
    chunks = build("1f1b", 2, NUM_LAYERS)
    with pytest.raises(ValueError, match=message):
        TiedWeights(chunks, names)


# Gradients divided by the number of tokens


def sums_over_tokens(data_iterator: Any, model: Stage) -> tuple[Tensor, Any]:
    """Some tokens do not count, and how many differs."""
    batch = next(data_iterator)
    mask = torch.rand(SEQUENCE, 2, generator=torch.Generator().manual_seed(batch["seed"])) < 0.6

    def loss_func(output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        loss = (
            F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none") * mask.flatten()
        ).sum()
        return loss, mask.sum(), {"loss": loss.detach()}

    return model(batch["tokens"], batch["seed"]), loss_func


@on_ranks(4)
def test_divided_by_the_tokens_of_all_stages_and_replicas(rank: int) -> None:
    """Where replicas add gradients up. A GradientReducer, which averages them, is in test_data_parallel.py."""

    def finalize(models: list[nn.Module], num_tokens: Tensor | None) -> None:
        for parameter in (parameter for model in models for parameter in model.parameters()):
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
        divide_by_num_tokens(models, num_tokens)

    def make(info: StageInfo) -> Stage:
        return Stage(info, NUM_LAYERS, calculate_per_token_loss=True, finalize_model_grads_func=finalize)

    proof = megapipe.prove(
        make,
        sums_over_tokens,
        data=[batch for seed in range(2) for batch in batches(M, seed)],
        schedule="1f1b",
        num_replicas=2,
        options={"seq_length": SEQUENCE, "micro_batch_size": BATCH},
    )
    assert proof, proof


def test_dividing_needs_a_number() -> None:
    with pytest.raises(ValueError, match="set config\\.calculate_per_token_loss"):
        divide_by_num_tokens([nn.Linear(1, 1)], None)
