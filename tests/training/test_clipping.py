"""Clipping by the norm of the whole model, however it is cut, sharded and replicated."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import build, reference, run
from ranks import RankPool
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from megapipe import parallel_state
from megapipe.training import clip_grad_norm_

NORMS = [2.0, 1.0, 3.0, math.inf]


def clip_as_torch_does(rank: int, schedule: str, pp_size: int) -> None:
    """Against torch's function on the unpartitioned model, in float64."""
    for norm_type in NORMS:
        chunks = build(schedule, pp_size, 8)
        run(schedule, chunks, 4)
        whole, _ = reference(8, 4)
        grads = {name: p.grad.double() for name, p in whole.named_parameters()}
        expected = torch.nn.utils.get_total_norm(grads.values(), norm_type)
        for max_norm, coefficient in ((2 * expected.item(), 1.0), (0.3, 0.3 / expected.item())):
            norm = clip_grad_norm_(chunks, max_norm, norm_type)
            torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
            for chunk in chunks:
                for name, parameter in chunk.named_parameters():
                    assert torch.equal(parameter.grad, whole.get_parameter(name).grad * coefficient), name


@pytest.mark.parametrize(("schedule", "pp_size"), [("no_pipelining", 1), ("1f1b", 2), ("zbv", 4)])
def test_of_the_whole_pipeline(ranks: RankPool, schedule: str, pp_size: int) -> None:
    ranks.run(pp_size, clip_as_torch_does, schedule, pp_size)


def norms_with_shards(rank: int) -> list[tuple[float, float]]:
    """2 stages, each shared out over 2 ranks; and a tied weight and experts besides."""
    parallel_state.initialize_model_parallel(2, expert_model_parallel_size=2)
    stage, shard = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    values = [torch.linspace(-3, 5, 35).view(7, 5) + k for k in range(2)]  # 7 rows: shards of 4 and 3

    def build_stage(k: int) -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(7, 5))
        return module

    module = build_stage(stage)
    fully_shard(module, mesh=mesh["dp"])
    rows = values[stage].tensor_split([4])[shard]
    module.weight.grad = module.weight.detach().clone()
    module.weight.grad.to_local().copy_(rows)
    tied, experts, replicated = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    tied.grad, tied.shared = torch.full((3,), 2.0), stage == 1
    experts.grad, experts.allreduce = torch.full((3,), 1.0 + rank), False
    replicated.grad = torch.full((3,), 7.0 + stage)
    rest = nn.ParameterList([tied, experts, replicated, nn.Parameter(torch.zeros(2))])  # the last without a gradient
    everything = [*values, torch.full((3,), 2.0)]
    everything += [torch.full((3,), 1.0 + r) for r in range(4)] + [torch.full((3,), 7.0 + k) for k in range(2)]
    flat = torch.cat([one.flatten() for one in everything]).double()
    found = []
    for norm_type in NORMS:
        found.append((clip_grad_norm_([module, rest], math.inf, norm_type).item(), flat.norm(norm_type).item()))
    clip_grad_norm_([module, rest], flat.norm().item() / 2)
    for grad, before in ((module.weight.grad.to_local(), rows), (tied.grad, torch.full((3,), 2.0))):
        torch.testing.assert_close(grad, before / 2)
    return found


def test_of_shards_experts_and_tied_weights(ranks: RankPool) -> None:
    for pairs in ranks.run(4, norms_with_shards):
        for norm, expected in pairs:
            assert norm == pytest.approx(expected, rel=1e-12)


def names_what_is_not_finite(rank: int, pp_size: int, rank_of_layer_3: int) -> None:
    chunks = build("zbv", pp_size, 8)
    run("zbv", chunks, 2)
    for norm_type in (2.0, math.inf):
        for value in (math.nan, math.inf):
            for chunk in chunks:
                if "3" in chunk.layers:
                    chunk.layers["3"].up.weight.grad[1, 2] = value
            with pytest.raises(RuntimeError, match=rf"gradient of layers\.3\.up\.weight on rank {rank_of_layer_3}\. "):
                clip_grad_norm_(chunks, 1.0, norm_type, error_if_nonfinite=True)
            norm = clip_grad_norm_(chunks, math.inf, norm_type)
            assert not norm.isfinite()


@pytest.mark.parametrize(("pp_size", "rank"), [(1, 0), (2, 1), (4, 3)])
def test_an_error_names_what_is_not_finite_on_every_rank(ranks: RankPool, pp_size: int, rank: int) -> None:
    ranks.run(pp_size, names_what_is_not_finite, pp_size, rank)


def a_shard_is_not_finite(rank: int) -> None:
    parallel_state.initialize_model_parallel(1)
    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    for norm_type in (2.0, math.inf):
        module.weight.grad = module.weight.detach().clone()
        module.weight.grad.to_local().fill_(math.nan if rank == 1 else 1.0)
        with pytest.raises(RuntimeError, match=r"gradient of weight on rank 1\. "):
            clip_grad_norm_(module, 1.0, norm_type, error_if_nonfinite=True)


def test_an_error_names_a_shard(ranks: RankPool) -> None:
    ranks.run(2, a_shard_is_not_finite)


@pytest.mark.parametrize("arguments", [{"max_norm": 0.0}, {"max_norm": math.nan}, {"norm_type": 0.0}])
def test_sizes_that_make_no_sense(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        clip_grad_norm_(nn.Linear(2, 2), **{"max_norm": 1.0, **arguments})


def test_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3.0, 4.0]])
    assert clip_grad_norm_(module, 1.0).item() == 5.0
    assert torch.equal(module.weight.grad, torch.tensor([[3.0, 4.0]]) * 0.2)
