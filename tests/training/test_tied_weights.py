"""An embedding that is also the head, wherever the two stages are; and gradients divided by the number of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tools.against import assert_same_gradients, gradients
from tools.marks import needs_fsdp_on_cpu
from tools.models import SEQUENCE, Stage, add_gradients, batches, build, run
from tools.ranks import RankPool, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from megapipe import (
    PipelinedOptimizer,
    PostValidatedOptimizer,
    StageInfo,
    TiedWeights,
    clip_grad_norm_,
    divide_by_num_tokens,
    parallel_state,
)

NAMES = ["embedding.weight", "head.weight"]
M = 5


def unpartitioned(num_copies: int, double: bool = False) -> Stage:
    """With its gradients; the weight is one tensor, or two whose gradients are summed."""
    model = Stage(StageInfo(0, 1), 8)
    if double:
        model.double()
    if num_copies == 1:
        model.head.weight = model.embedding.weight
    else:
        model.head.weight.data.copy_(model.embedding.weight.data)
    add_gradients(model, M)
    if num_copies == 2:
        total = model.embedding.weight.grad + model.head.weight.grad
        model.embedding.weight.grad = model.head.weight.grad = total
    return model


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [
        (1, [("no_pipelining", None, False), ("no_pipelining", None, True)]),
        (2, [("1f1b", None, False), ("zb2p", None, True), ("zbv", None, False), ("interleaved_1f1b", 2, True)]),
        (4, [("zb1p", None, False), ("interleaved_zb1p", 2, True), ("zbv", None, True), ("dualpipev", None, True)]),
    ],
)
@on_ranks()
def test_gradients_of_the_unpartitioned_tied_model(
    rank: int, num_ranks: int, cases: list[tuple[str, int | None, bool]]
) -> None:
    for schedule, num_chunks, deferred in cases:
        chunks = build(schedule, num_ranks, 8, num_chunks, deferred=deferred)
        tied = TiedWeights(chunks, NAMES)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = tied.sum_gradients
        run(schedule, chunks, M)
        # To the bit where the reference adds up each copy by itself, as ranks must.
        assert_same_gradients(chunks, unpartitioned(2), schedule)
        # One tensor's gradient is added up in another order: the same in float64 to its last digits.
        chunks = [chunk.double() for chunk in build(schedule, num_ranks, 8, num_chunks, deferred=deferred)]
        tied = TiedWeights(chunks, NAMES)
        for chunk in chunks:
            chunk.config.finalize_model_grads_func = tied.sum_gradients
        run(schedule, chunks, M)
        expected = unpartitioned(1, double=True)
        assert_same_gradients(chunks, expected, schedule, atol=1e-13)
        norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.25)
        torch.testing.assert_close(clip_grad_norm_(chunks, 0.25), norm, rtol=1e-12, atol=0)


@on_ranks(2)
def test_steps_sum_by_themselves(rank: int) -> None:
    """A function of the user's own in place of the sum was accepted, and the two copies grew apart without a word."""
    chunks = build("1f1b", 2, 8)
    tied = TiedWeights(chunks, NAMES)
    tied.sum_in_steps(chunks)
    called = []
    chunks[0].config.finalize_model_grads_func = lambda *arguments: called.append(rank)
    run("1f1b", chunks, M)
    assert_same_gradients(chunks, unpartitioned(2), "1f1b")
    for finalize in (tied.sum_gradients, None):
        chunks[0].zero_grad()
        chunks[0].config.finalize_model_grads_func = finalize
        run("1f1b", chunks, M)
        assert_same_gradients(chunks, unpartitioned(2), "1f1b")
    assert called == [rank]
    chunks[0].zero_grad()
    chunks[0].tied_weights.clear()
    run("1f1b", chunks, M)
    own = chunks[0].head.weight if rank else chunks[0].embedding.weight
    assert not torch.equal(own.grad, unpartitioned(2).head.weight.grad)


@needs_fsdp_on_cpu
@on_ranks(2)
def test_sharded_after_they_were_tied(rank: int) -> None:
    """`fully_shard` puts other parameters in their place. The sum was that of the old ones, which nobody trained."""
    chunks = build("1f1b", 2, 8)
    TiedWeights(chunks, NAMES).sum_in_steps(chunks)
    fully_shard(chunks[0], mesh=DeviceMesh.from_group(parallel_state.get_data_parallel_group(), "cpu"))
    run("1f1b", chunks, M)
    own = chunks[0].head.weight if rank else chunks[0].embedding.weight
    assert torch.equal(own.grad.full_tensor(), unpartitioned(2).head.weight.grad)
    assert getattr(own, "shared", False) == (rank == 1)


def stay_equal(rank: int, schedule: str) -> tuple[Tensor, ...]:
    """After steps of which some are clipped, the ordinary way and validated afterwards."""
    found = []
    for is_post_validated in (False, True):
        chunks = build(schedule, 2, 8)
        tied = TiedWeights(chunks, NAMES)
        chunks[0].config.finalize_model_grads_func = lambda models, num_tokens, tied=tied: tied.sum_gradients()

        def adamw(groups: Any) -> torch.optim.Optimizer:
            return torch.optim.AdamW(groups, lr=1e-2)

        max_norm = 0.9
        if is_post_validated:
            optimizer = PostValidatedOptimizer(chunks, adamw, max_norm)
            chunks[0].config.post_validated_optimizer = optimizer
        else:
            optimizer = PipelinedOptimizer(chunks, adamw)
        for step in range(8):
            run(schedule, chunks, 3, seed=step)
            if not is_post_validated:
                clip_grad_norm_(chunks, max_norm)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finalize()
        found += [p.detach() for chunk in chunks for name, p in chunk.named_parameters() if name in NAMES]
    return tuple(found)


@pytest.mark.parametrize("schedule", ["zb2p", "zbv"])
def test_copies_stay_equal(ranks: RankPool, schedule: str) -> None:
    copies = [copy for of_rank in ranks.run(2, stay_equal, schedule) for copy in of_rank]
    assert len(copies) == 4
    for copy in copies[1:]:
        assert torch.equal(copy, copies[0])


@on_ranks(2)
def test_one_parameter_under_two_names(rank: int) -> None:
    """V placement: nothing to sum."""
    chunks = build("zbv", 2, 8)
    if rank == 0:
        chunks[1].head.weight = chunks[0].embedding.weight
    tied = TiedWeights(chunks, NAMES)
    run("zbv", chunks, M)
    before = None if rank else chunks[0].embedding.weight.grad.clone()
    tied.sum_gradients()
    if rank == 0:
        assert torch.equal(chunks[0].embedding.weight.grad, before)
        assert not hasattr(chunks[0].embedding.weight, "shared")
        expected = unpartitioned(1)
        torch.testing.assert_close(before, expected.embedding.weight.grad)


@on_ranks(1)
def test_one_parameter_under_two_names_of_one_chunk(rank: int) -> None:
    """Nothing to sum either, and both names are known."""
    (chunk,) = build("no_pipelining", 1, 8)
    chunk.head.weight = chunk.embedding.weight
    tied = TiedWeights(chunk, NAMES)
    run("no_pipelining", chunk, M)
    before = chunk.head.weight.grad.clone()
    tied.sum_gradients()
    assert torch.equal(chunk.head.weight.grad, before)


def with_replicas(rank: int) -> list[Tensor]:
    chunks = build("1f1b", 2, 8)
    tied = TiedWeights(chunks, NAMES)
    replica = parallel_state.get_data_parallel_rank()
    run("1f1b", chunks, 3, seed=replica)
    tied.sum_gradients()
    return [p.grad for chunk in chunks for name, p in chunk.named_parameters() if name in NAMES]


def test_each_pipeline_sums_its_own(ranks: RankPool) -> None:
    (first,), (second,), (third,), (fourth,) = ranks.run(4, with_replicas)
    assert torch.equal(first, third)
    assert torch.equal(second, fourth)
    assert not torch.equal(first, second)


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
    chunks = build("1f1b", 2, 8)
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


def divided(rank: int, schedule: str, averaged: bool) -> None:
    chunks = build(schedule, 2, 8, calculate_per_token_loss=True)
    replicas = parallel_state.get_data_parallel_group()

    def finalize(models: list[nn.Module], num_tokens: Tensor | None) -> None:
        for model in models:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad, group=replicas)
                if averaged:
                    parameter.grad /= replicas.size()
        divide_by_num_tokens(models, num_tokens, averaged=averaged)

    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize
    run(schedule, chunks, M, forward_step_func=sums_over_tokens, seed=replicas.rank())
    per_replica, num_tokens = [], 0
    for seed in range(replicas.size()):
        whole = Stage(StageInfo(0, 1), 8)
        for batch in batches(M, seed):
            output, loss_func = sums_over_tokens(iter([batch]), whole)
            loss, num, _ = loss_func(output)
            loss.backward()
            num_tokens += num
        per_replica.append(whole)
    sums = {name: sum(whole.get_parameter(name).grad for whole in per_replica) for name in gradients(per_replica[0])}
    assert_same_gradients(chunks, {name: grad / num_tokens for name, grad in sums.items()})


@pytest.mark.parametrize(
    ("num_ranks", "schedule", "averaged"), [(2, "zbv", False), (4, "1f1b", False), (4, "zb1p", True)]
)
def test_divided_by_the_tokens_of_all_stages_and_replicas(
    ranks: RankPool, num_ranks: int, schedule: str, averaged: bool
) -> None:
    ranks.run(num_ranks, divided, schedule, averaged)


def test_dividing_needs_a_number(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="set config\\.calculate_per_token_loss"):
        divide_by_num_tokens([nn.Linear(1, 1)], None)
