"""Replicas without sharding: gradients are averages, reduced while other chunks compute."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import Stage, build, run
from tools.ranks import on_ranks
from tools.replicas import build_replicas, reduced
from torch import Tensor, nn

from megapipe import PipelineError, parallel_state
from megapipe.checkpoint import Checkpointer
from megapipe.config import StepConfig
from megapipe.runtime.grad_sync import GradientSync
from megapipe.training import GradientReducer


def replicated(schedule: str, pp_size: int, **options: Any) -> tuple[list[Stage], GradientReducer]:
    chunks = build_replicas(schedule, pp_size)
    return chunks, reduced(chunks, **options)


@on_ranks(1)
def test_zero_redundancy_optimizer(rank: int, tmp_path: Path) -> None:
    """Its state is not all on one rank, and saving it failed with torch's advice, which does not help."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # torch compiles functions for it

    parallel_state.initialize_model_parallel()
    optimizer = ZeroRedundancyOptimizer((layer := nn.Linear(2, 2)).parameters(), torch.optim.AdamW, lr=1e-2)
    with pytest.raises(ValueError, match="optimizer 0 is a ZeroRedundancyOptimizer, whose state_dict"):
        Checkpointer(tmp_path, layer, optimizer).save(1)


class Log:
    """What is called of torch.distributed, and what the pipeline does around it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        all_reduce = dist.all_reduce

        def logged(tensor: Tensor, **options: Any) -> Any:
            assert options["async_op"]
            self.sizes.append(tensor.numel())
            return all_reduce(tensor, **options)

        monkeypatch.setattr(dist, "all_reduce", logged)


@on_ranks(4)
def test_a_reduction_per_chunk_while_others_compute(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        log = Log(patch)
        chunks, reducer = replicated("zbv", 2)
        counts: list[int] = []
        for chunk in chunks:
            chunk.config = chunks[0].config
        chunks[0].config.finalize_model_grads_func = lambda models, tokens: (
            counts.append(len(log.sizes)),
            reducer.finish(models),
        )
        run("zbv", chunks, 3)
        # One per chunk, the last chunk's first, under way before the step has ended.
        sizes = [[p.numel() for p in chunk.parameters()] for chunk in reversed(chunks)]
        assert log.sizes == [sum(one) + len(one) for one in sizes]
        assert counts == [2]

        chunks, _ = replicated("zbv", 2, bucket_cap_mb=2**-10)  # 1 KiB: 256 numbers
        log.sizes.clear()
        run("zbv", chunks, 3)
        assert max(log.sizes) == 512 + 1  # a matrix by itself
        assert sum(log.sizes) == sum(sum(one) + len(one) for one in sizes)


class Odd(nn.Module):
    """A linear layer that only odd replicas use, one that nobody uses, a frozen one, and one with experts' weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(dist.get_rank())  # the first replica's values are taken
        self.odd, self.idle, self.frozen, self.expert = (nn.Linear(2, 2) for _ in range(4))
        self.frozen.requires_grad_(False)
        self.register_buffer("count", torch.tensor(dist.get_rank()))
        for parameter in self.expert.parameters():
            parameter.allreduce = False


@on_ranks(4)
def test_unused_frozen_and_expert_parameters(rank: int) -> None:
    parallel_state.initialize_model_parallel(expert_model_parallel_size=2)
    model = Odd()
    reducer = GradientReducer([model])
    if rank == 0:
        assert model.count == 0
    replicas: list[Any] = [None] * 4
    dist.all_gather_object(replicas, {name: p.detach() for name, p in model.state_dict().items()})
    for replica, state in enumerate(replicas):
        for name, value in state.items():
            first = replicas[replica % 2 if name.startswith("expert") else 0]
            assert torch.equal(value, first[name]), name
    for _ in range(2):  # a second time into the gradients of the first, which are averages
        model.expert.zero_grad()
        model.expert(torch.ones(2)).sum().mul(rank).backward()
        if rank % 2:
            model.odd(torch.full((2,), float(rank))).sum().backward()
        reducer.finish([model])
    assert torch.equal(model.odd.weight.grad, torch.full((2, 2), 2 * (1.0 + 3.0) / 4))
    assert torch.equal(model.odd.bias.grad, torch.full((2,), 2 * 2 / 4))
    assert model.idle.weight.grad is None
    assert model.frozen.weight.grad is None
    assert torch.equal(model.expert.weight.grad, torch.full((2, 2), (rank % 2 + rank % 2 + 2) / 4))


class Wide(nn.Module):
    """A parameter that is part of another tensor, one whose gradient is of another dtype, and a buffer of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Parameter(torch.randn(4, 9)[:, :3])
        self.short = nn.Parameter(torch.randn(2, dtype=torch.bfloat16))
        if hasattr(self.short, "grad_dtype"):
            self.short.grad_dtype = torch.float32
        self.register_buffer("count", torch.randint(99, (3,)).to(torch.int16))


@on_ranks(2)
def test_what_lies_otherwise_in_memory_and_other_dtypes(rank: int) -> None:
    """Replica 0's memory was sent as it lay, with what lies between the rows. Gradients of another dtype ended the
    process where a replica had none, and gloo does not know all integers."""
    parallel_state.initialize_model_parallel()
    torch.manual_seed(rank)
    model = Wide()
    reducer = GradientReducer([model])
    replicas: list[Any] = [None] * 2
    dist.all_gather_object(replicas, [t.detach().float().clone() for t in model.state_dict().values()])
    assert all(map(torch.equal, *replicas))
    if rank == 0:
        model.short.grad = torch.full((2,), 3.0, dtype=getattr(model.short, "grad_dtype", torch.bfloat16))
    reducer.finish([model])
    assert torch.equal(model.short.grad.float(), torch.full((2,), 1.5))


class Tied(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


@on_ranks(2)
def test_weights_tied_within_a_rank(rank: int) -> None:
    """A weight in both chunks is complete when both are."""
    parallel_state.initialize_model_parallel()
    weight = nn.Parameter(torch.zeros(2))
    chunks = [Tied(weight), Tied(weight)]
    reducer = GradientReducer(chunks)
    for scale in (1.0, 3.0):
        weight.grad = torch.ones(2) * scale * rank
        reducer.start(chunks[1].parameters())
        weight.grad += scale
        reducer.start(chunks[0].parameters())
        reducer.finish(chunks)
        assert torch.equal(weight.grad, torch.full((2,), 1.5 * scale))


def test_replicas_reduce_chunks_in_one_order() -> None:
    """Whichever is complete first: each replica may have tuned the places of its Ws for itself."""
    log: list[int] = []
    chunks = [nn.Linear(1, size) for size in (1, 2, 3)]
    config = StepConfig(grad_sync_func=lambda parameters: log.append(len(next(iter(parameters)))))
    for order in ([2, 1, 0], [0, 1, 2], [1, 0, 2]):
        log.clear()
        with GradientSync(config, chunks, 1, True) as sync:
            for chunk in order:
                with sync.last_gradients(chunk, in_w=True):
                    pass
        assert log == [3, 2, 1]


@on_ranks(2)
def test_mistakes(rank: int) -> None:
    parallel_state.initialize_model_parallel()
    model = nn.Sequential(nn.Linear(2, 2 + rank), nn.Embedding(3, 2, sparse=True))
    with pytest.raises(ValueError, match=r"chunk 0's 0.weight is \[2, 2\] .* replica 0 and \[3, 2\] .* on replica 1"):
        GradientReducer([model])
    GradientReducer([nn.ParameterList([torch.zeros(0), torch.zeros(2)])])  # no bucket was there for the first
    with pytest.raises(ValueError, match="bucket_cap_mb must be positive, got 0"):
        GradientReducer([model], bucket_cap_mb=0)
    reducer = GradientReducer([model[1]])
    model[1](torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"shape \[3, 2\] is sparse"):
        reducer.finish([model[1]])


@on_ranks(2)
def test_per_token_loss(rank: int) -> None:
    """Losses that are sums over tokens, of which replicas have different numbers."""
    parallel_state.initialize_model_parallel()
    model = nn.Linear(3, 1, bias=False)
    reducer = GradientReducer([model])
    tokens = [torch.randn(n, 3, generator=torch.Generator().manual_seed(n)) for n in (2, 5)]
    model(tokens[rank]).sum().backward()
    reducer.start(model.parameters())
    reducer.finish([model], torch.tensor(len(tokens[rank])))
    assert torch.allclose(model.weight.grad, torch.cat(tokens).mean(0, keepdim=True))


@on_ranks(1)
def test_a_chunk_with_a_reducer_can_be_copied(rank: int) -> None:
    """Its config holds methods of the reducer, and the reducer connections, which cannot be copied."""
    chunks, _ = replicated("1f1b", 1)
    other = copy.deepcopy(chunks[0])
    run("1f1b", other, 2, forward_only=True)
    run("1f1b", chunks, 2)
    with pytest.raises(ValueError, match="has no part in the GradientReducer"):
        run("1f1b", other, 2)


@on_ranks(2)
def test_replicas_of_what_is_unfrozen_later(rank: int) -> None:
    """A parameter that was frozen, or not there, when the GradientReducer was made was not averaged. The replicas
    drifted apart, silently."""
    chunks = build("no_pipelining", 1, 2)
    chunks[0].layers.requires_grad_(False)
    reduced(chunks)
    run("no_pipelining", chunks, 2, seed=rank)
    chunks[0].layers.requires_grad_(True)
    # The error of this rank, or of the other one, where that was first to tell it.
    with pytest.raises((ValueError, PipelineError), match=r"has no part in the GradientReducer.*make a new one"):
        run("no_pipelining", chunks, 2, seed=rank)
