"""The example's mixture of experts, alone and in a pipeline."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools.against import assert_same_gradients, step
from tools.collectives import watching
from tools.ranks import RankPool, on_ranks
from torch import Tensor

import megapipe
from megapipe import StageInfo, parallel_state

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from gpt import GPTConfig, GPTStage
from moe import MoE, balance_loads, load_balancing_loss

HIDDEN, EXPERTS, TOPK = 8, 4, 2
AUX = {"moe_aux_loss_coeff": 0.1, "moe_aux_loss_scale": 0.5}
NO_AUX = {"moe_aux_loss_coeff": 0.0}


def make_moe(group: Any = None, aux: dict[str, float] = NO_AUX) -> MoE:
    torch.manual_seed(1)
    config = GPTConfig(hidden_size=HIDDEN, num_experts=EXPERTS, expert_model_parallel_group=group, **aux)
    return MoE(config).double()


def tokens_of(replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(replica)
    return torch.randn(5 + replica, 3, HIDDEN, dtype=torch.float64, generator=generator)


def set_routing(moe: MoE, routing: str) -> None:
    """How the tokens choose."""
    with torch.no_grad():
        if routing == "even":
            moe.router.weight.normal_(generator=torch.Generator().manual_seed(3))
        elif routing == "few":  # the experts 2 and 3 are never chosen: with two ranks, all of the second one's
            moe.router.weight.zero_()


# One layer


@pytest.mark.parametrize("routing", ["even", "few"])
def test_equal_to_every_token_by_itself(routing: str) -> None:
    moe = make_moe()
    set_routing(moe, routing)
    x = tokens_of(0)
    expected = torch.zeros_like(x)
    for place in [(row, column) for row in range(x.shape[0]) for column in range(x.shape[1])]:
        token = x[place]
        weights, experts = (moe.router.weight @ token.float().to(token)).softmax(0).topk(TOPK)
        out = moe.shared(token)
        for weight, expert in zip(weights / weights.sum(), experts):
            inner = F.gelu(moe.experts.up.weight[expert] @ token)
            out = out + weight * (moe.experts.down.weight[expert] @ inner)
        expected[place] = out
    torch.testing.assert_close(moe(x), expected, rtol=0, atol=1e-6)  # the router computes in float32


def test_gradient_of_the_auxiliary_loss() -> None:
    """As if it had been added to the loss."""
    moe, plain = make_moe(aux=AUX), make_moe()
    x, y = tokens_of(0).requires_grad_(), tokens_of(0).requires_grad_()
    moe(x).square().sum().backward()
    probabilities = F.linear(y.flatten(0, 1).float(), plain.router.weight.float()).softmax(-1)
    aux_loss = load_balancing_loss(probabilities, probabilities.topk(TOPK).indices)
    (plain(y).square().sum() + AUX["moe_aux_loss_coeff"] * AUX["moe_aux_loss_scale"] * aux_loss).backward()
    assert not torch.allclose(moe.router.weight.grad, make_gradient(plain), atol=1e-9)
    torch.testing.assert_close(moe.router.weight.grad, plain.router.weight.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-6)


def make_gradient(moe: MoE) -> Tensor:
    """The router's, without the auxiliary loss."""
    (grad,) = torch.autograd.grad(moe(tokens_of(0)).square().sum(), moe.router.weight)
    return grad


def test_the_balancing_loss_is_1_when_even() -> None:
    even = torch.full((8, EXPERTS), 1 / EXPERTS)
    assert load_balancing_loss(even, torch.arange(16).view(8, 2) % EXPERTS).item() == 1
    assert load_balancing_loss(even, torch.zeros(8, 1, dtype=torch.long)).item() == 1
    skewed = torch.tensor([[1.0, 0, 0, 0]]).expand(8, -1)
    assert load_balancing_loss(skewed, torch.zeros(8, 1, dtype=torch.long)).item() == EXPERTS


def test_biases_even_out_the_loads() -> None:
    """Choices follow them; the weights of what is chosen do not."""
    moe = make_moe()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.bias.copy_(torch.tensor([0.0, 0.01, 0.02, 0.05]))  # all tokens choose the last two
    x = tokens_of(0)
    weights, experts = moe.router(x.flatten(0, 1))
    assert experts.unique().tolist() == [2, 3]
    assert torch.equal(weights, torch.full_like(weights, 0.5))
    with torch.no_grad():
        moe(x)
    moe.eval()(x)
    assert moe.router.load.tolist() == [0, 0, 15, 15], "what is not trained on does not count"
    balance_loads([moe], 0.01, None)
    torch.testing.assert_close(moe.router.bias.float(), torch.tensor([0.01, 0.02, 0.01, 0.04]))
    assert moe.router.load.tolist() == [0, 0, 0, 0]
    assert moe.router(x.flatten(0, 1))[1].unique().tolist() == [1, 3]


@on_ranks(2)
def test_loads_of_all_replicas_count(rank: int) -> None:
    moe = make_moe()
    moe.router.load[:2] = torch.tensor([6.0, 0.0]) if rank else torch.tensor([0.0, 8.0])
    balance_loads([moe], 0.5, dist.group.WORLD)
    assert moe.router.bias.tolist() == [-0.5, -0.5, 0.5, 0.5]


@pytest.mark.parametrize("routing", ["even", "few"])
@on_ranks(2)
def test_shared_out_is_the_same(rank: int, routing: str) -> None:
    """Two ranks with half of the experts each, against one rank with all experts and both ranks' tokens."""
    moe, whole = make_moe(dist.group.WORLD, AUX), make_moe(aux=AUX)
    set_routing(whole, routing)
    moe.router.load_state_dict(whole.router.state_dict())
    moe.shared.load_state_dict(whole.shared.state_dict())
    ours = slice(2 * rank, 2 * rank + 2)
    with torch.no_grad():
        moe.experts.up.weight.copy_(whole.experts.up.weight[ours])
        moe.experts.down.weight.copy_(whole.experts.down.weight[ours])
    inputs = [tokens_of(replica).requires_grad_() for replica in range(2)]
    outputs = [whole(x) for x in inputs]
    sum(output.sin().sum() for output in outputs).backward()
    x = tokens_of(rank).requires_grad_()
    output = moe(x)
    output.sin().sum().backward()
    same = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(output, outputs[rank], **same)
    torch.testing.assert_close(x.grad, inputs[rank].grad, **same)
    torch.testing.assert_close(moe.experts.up.weight.grad, whole.experts.up.weight.grad[ours], **same)
    torch.testing.assert_close(moe.experts.down.weight.grad, whole.experts.down.weight.grad[ours], **same)
    for name in ("router.weight", "shared.up.weight", "shared.down.weight", "shared.up.bias"):
        grad = moe.get_parameter(name).grad
        dist.all_reduce(grad)
        torch.testing.assert_close(
            grad, whole.get_parameter(name).grad, rtol=0, atol=1e-7 if "router" in name else 1e-12
        )


@on_ranks(3)
def test_experts_that_cannot_be_shared_out(rank: int) -> None:
    with pytest.raises(ValueError, match="topk=5 of 4 experts"):
        MoE(GPTConfig(num_experts=4, moe_topk=5))
    with pytest.raises(ValueError, match="4 experts cannot be shared out evenly among 3 ranks"):
        make_moe(dist.group.WORLD)
    for sizes, message in (
        ((1, None, 2), "expert_model_parallel_size=2 does not divide the 3 replicas"),
        ((0,), r"pipeline_model_parallel_size=0 and .*_size=1 must be at least 1"),
    ):
        with pytest.raises(ValueError, match=message):
            parallel_state.initialize_model_parallel(*sizes)


# In a pipeline

SIZES = {"hidden_size": 16, "num_layers": 4, "num_attention_heads": 2, "vocab_size": 11, "max_position_embeddings": 6}


def build(stages: list[StageInfo], num_microbatches: int, **options: Any) -> list[GPTStage]:
    config = GPTConfig(
        **SIZES,
        num_experts=EXPERTS,
        moe_aux_loss_scale=1 / num_microbatches,
        expert_model_parallel_group=parallel_state.get_expert_model_parallel_group(),
        **options,
    )
    return [GPTStage(config, stage) for stage in stages]


def batches(replica: int, num_microbatches: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(replica)
    texts = [torch.randint(11, (7, 2), generator=generator) for _ in range(num_microbatches)]
    return [(text[:-1], text[1:]) for text in texts]


def run(schedule: str, chunks: list[GPTStage], replica: int, num_microbatches: int) -> list[Any]:
    data = batches(replica, num_microbatches)
    return step(schedule, chunks, data, loss_of, in_parts=True, seq_length=6, micro_batch_size=2)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def in_a_pipeline(rank: int, schedules: list[str], num_microbatches: int) -> list[list[Any]]:
    """pp=2 x ep=2, then pp=1 x ep=2 with the same layers on both pairs of ranks. A rank keeps its experts."""
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    replica = parallel_state.get_data_parallel_rank()
    assert replica == parallel_state.get_expert_model_parallel_rank() == rank % 2
    results = []
    all_exchanges = []
    for schedule in schedules:
        chunks = build(megapipe.stages_for_rank(schedule), num_microbatches)
        exchanges: list[Any] = []
        with watching(lambda name, x, *splits, exchanges=exchanges: exchanges.append(splits)):
            results.append((chunks, run(schedule, chunks, replica, num_microbatches)))
        all_exchanges.append(exchanges)
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, expert_model_parallel_size=2)
    assert parallel_state.get_expert_model_parallel_rank() == replica
    (whole,) = build(megapipe.stages_for_rank("no_pipelining"), num_microbatches)
    losses = run("no_pipelining", [whole], replica, num_microbatches)
    for chunks, reports in results:
        assert reports == (losses if any(chunk.stage.is_last for chunk in chunks) else [])
        assert_same_gradients(chunks, whole)
    return all_exchanges


def test_equal_to_no_pipelining(ranks: RankPool) -> None:
    """And of two ranks that share out experts, each sends what the other expects, in every exchange: backwards split or
    not, both make the same exchanges in the same order, or one would wait forever for the other."""
    schedules, num_microbatches = ["zb1p", "dualpipev"], 3
    per_rank = ranks.run(4, in_a_pipeline, schedules, num_microbatches)
    for first, second in ((0, 1), (2, 3)):
        for ours, theirs in zip(per_rank[first], per_rank[second]):
            # Per microbatch, 2 layers with counts, dispatch and combine, and the last two in backward.
            assert len(ours) == len(theirs) == num_microbatches * 2 * 5
            for (our_output, our_input, _), (their_output, their_input, _) in zip(ours, theirs):
                assert (our_output[1], our_input[1]) == (their_input[0], their_output[0])
