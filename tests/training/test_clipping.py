"""Clipping by the norm of the whole model, however it is cut, sharded and replicated."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.models import build, run
from tools.optimizers import sgd
from tools.ranks import RankPool, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from megapipe import PostValidatedOptimizer, TiedWeights, clip_grad_norm_, divide_by_num_tokens, parallel_state

NORMS = [2.0, 1.0, 3.0, math.inf]


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


@on_ranks(2)
def test_an_error_names_what_is_not_finite_on_every_rank(rank: int) -> None:
    chunks = build("zbv", 2, 8)
    run("zbv", chunks, 2)
    for norm_type, value in ((2.0, math.inf), (math.inf, math.nan)):
        for chunk in chunks:
            if "3" in chunk.layers:
                chunk.layers["3"].up.weight.grad[1, 2] = value
        with pytest.raises(RuntimeError, match=r"gradient of layers\.3\.up\.weight on rank 1\. "):
            clip_grad_norm_(chunks, 1.0, norm_type, error_if_nonfinite=True)
        norm = clip_grad_norm_(chunks, math.inf, norm_type)
        assert not norm.isfinite()


@on_ranks(2)
def test_an_error_names_a_shard(rank: int) -> None:
    parallel_state.initialize_model_parallel(1)
    module = nn.Linear(4, 4, bias=False)
    fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    for norm_type in (2.0, math.inf):
        module.weight.grad = module.weight.detach().clone()
        module.weight.grad.to_local().fill_(math.nan if rank == 1 else 1.0)
        with pytest.raises(RuntimeError, match=r"gradient of weight on rank 1\. "):
            clip_grad_norm_(module, 1.0, norm_type, error_if_nonfinite=True)


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


def test_complex_parameters() -> None:
    """They ended with an error of torch's."""
    module, other = nn.Module(), nn.Module()
    for one in (module, other):
        one.weight = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        one.weight.grad = torch.tensor([3 + 4j, 12j])
    norm = clip_grad_norm_(module, 1.0)
    torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0).double())
    torch.testing.assert_close(module.weight.grad, other.weight.grad)


def sharded_and_parallel(rank: int) -> None:
    """Sharded over data-parallel ranks what is sharded over tensor-parallel ranks."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", "dp_shard", "tp"))
    parallel_state.initialize_from_mesh(mesh)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    model = copy.deepcopy(whole)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp_shard"])
    x = torch.randn(6, 8)
    for one in (whole, model):
        one(x).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert torch.allclose(clip_grad_norm_(model, math.inf).float(), expected)


def partial_gradients(rank: int) -> None:
    """Of a norm in a sequence-parallel region: replicated, and each rank has a part of the gradient's sum."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    parallel_state.initialize_from_mesh(mesh)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8))
    model = copy.deepcopy(whole)
    styles = {
        "0": SequenceParallel(sequence_dim=0),
        "1": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], styles)
    x = torch.randn(6, 8)
    whole(x).square().sum().backward()
    model(x.tensor_split(2)[rank]).square().sum().backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters()])
    assert torch.allclose(clip_grad_norm_(model, math.inf).float(), expected)


def test_norms_of_tensor_parallel_models(ranks: RankPool) -> None:
    """A strided shard says that it is no shard, and a partial gradient was taken for the whole. Norms were too small,
    and other ones on every rank."""
    ranks.run(4, sharded_and_parallel)
    if torch.__version__ < "2.13":  # its DTensor takes a mesh for an equal one whose process groups are gone
        ranks.stop()
    ranks.run(2, partial_gradients)


def test_one_kernel_for_gradients_of_a_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients were multiplied by a number in float64. On a GPU torch does that with a kernel for each parameter, and
    with one for all of them only where all are of one type."""
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3), nn.Linear(3, 3).double()])
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    calls = []

    def watched(function: Any) -> Any:
        def call(tensors: list[torch.Tensor], number: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append({tensor.dtype for tensor in [*tensors, number] if isinstance(tensor, torch.Tensor)})
            return function(tensors, number, *args, **kwargs)

        return call

    for name in ("_foreach_norm", "_foreach_mul_", "_foreach_div_"):
        monkeypatch.setattr(torch, name, watched(getattr(torch, name)))
    norm = clip_grad_norm_([model], 1.0)
    divide_by_num_tokens([model], torch.tensor(4))
    assert norm == math.sqrt(48)
    assert len(calls) == 7  # bfloat16 is multiplied and divided in float32
    assert all(len(dtypes) == 1 for dtypes in calls)
    for parameter in model.parameters():
        clipped = torch.ones_like(parameter) * (1 / norm).to(parameter.dtype)
        assert torch.equal(parameter.grad, clipped / 4)


def test_sparse_gradients_have_no_norm() -> None:
    """Torch's error took a page, and named no parameter."""
    model = nn.Embedding(3, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="the gradient of weight is sparse"):
        clip_grad_norm_(model, 1.0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_norms_whose_reciprocal_is_no_number_in_16_bits(dtype: torch.dtype) -> None:
    """max_norm / norm was rounded to float16 before gradients were multiplied by it. From norms of 1e6 on they were
    clipped to 1.01 or 1.79, and from 3e7 on to 0."""
    shapes = [(3,), (500, 500), ()]
    for value in (1e2, 1e3, 3e4):
        model = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)
        expected = []
        for parameter in model:
            parameter.grad = torch.linspace(0.5, 1, parameter.numel()).mul(value).reshape(parameter.shape).to(dtype)
            expected.append(parameter.grad.double())
        norm = clip_grad_norm_(model, 8.0)
        assert norm > 250 * value
        for parameter, grad in zip(model, expected):
            torch.testing.assert_close(parameter.grad, (grad * (8 / norm)).to(dtype))


def test_more_tokens_than_float16_can_say() -> None:
    model = nn.Linear(3, 3).half()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1000.0)
    divide_by_num_tokens([model], torch.tensor(100_000))
    assert all(torch.equal(p.grad, torch.full_like(p, 0.01)) for p in model.parameters())


@on_ranks(2)
def test_gradients_that_others_accumulate(rank: int) -> None:
    """Layers add to `main_grad` where there is one, which the norm, its clipping and the sums over tied weights passed
    over. They took such a gradient for none, silently."""
    chunks = build("1f1b", 2, 2, deferred=True)
    for parameter in chunks[0].parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float64)
    run("1f1b", chunks, 2)
    tied = TiedWeights(chunks, ["embedding.weight", "head.weight"])
    calls: list[Callable[[], Any]] = [lambda: clip_grad_norm_(chunks, 1.0), tied.sum_gradients]
    calls += [lambda: divide_by_num_tokens(chunks, torch.tensor(2)), PostValidatedOptimizer(chunks, sgd, 1.0).step]
    for call in calls:
        with pytest.raises(ValueError, match=r"weight has its gradient in main_grad, of another's making"):
            call()
