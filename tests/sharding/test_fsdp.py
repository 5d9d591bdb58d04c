"""Chunks sharded by torch's fully_shard: the same training as in one process, one gather and one reduction per step."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.against import assert_same_gradients, full
from tools.models import VOCABULARY, Stage, add_gradients, batches, loss_of, run
from tools.ranks import on_ranks, start_again
from tools.replicas import NUM_LAYERS, NUM_MICROBATCHES, build_replicas
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.torch_version import TorchVersion

import megapipe
from benchmarks.memory import gathered_bytes
from megapipe import StageInfo, parallel_state, stages_for_rank
from megapipe.graph import capture
from megapipe.plan import StageBytes, make_plan
from megapipe.proving.whole import mean_of_replicas
from megapipe.sharding import ShardedChunks


def assert_same(chunks: list[Stage], expected: dict[str, Any], what: str) -> None:
    assert all(isinstance(p.grad, (DTensor, type(None))) for chunk in chunks for p in chunk.parameters())
    assert_same_gradients(chunks, expected, what)


def use_mesh(**shape: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_from_mesh(init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape)))


def shard(chunks: list[Stage], by_layer: bool = True, **options: Any) -> list[Stage]:
    """As users do: each layer, and the whole chunk with what is left."""
    for chunk in chunks:
        for layer in chunk.layers.values() if by_layer else ():
            fully_shard(layer, mesh=parallel_state.get_data_parallel_mesh(), **options)
        fully_shard(chunk, mesh=parallel_state.get_data_parallel_mesh(), **options)
    return chunks


class Counts:
    """The collectives of FSDP2, with their sizes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.gathers: list[int] = []
        self.reductions: list[int] = []
        names = ("all_gather_single", "reduce_scatter_single")
        if not hasattr(dist, names[0]):  # torch before 2.13
            names = ("all_gather_into_tensor", "reduce_scatter_tensor")
        gather, reduce = (getattr(dist, name) for name in names)

        def logged_gather(output: Tensor, *args: Any, **options: Any) -> Any:
            self.gathers.append(output.numel())
            assert options["async_op"]
            return gather(output, *args, **options)

        def logged_reduce(*args: Any, **options: Any) -> Any:
            self.reductions.append(options["input"].numel())
            return reduce(*args, **options)

        patch.setattr(dist, names[0], logged_gather)
        patch.setattr(dist, names[1], logged_reduce)


@on_ranks(2)
def test_one_gather_and_one_reduction_per_chunk_and_step(rank: int) -> None:
    use_mesh(pp=1, dp=2)
    with pytest.MonkeyPatch.context() as patch:
        counts = Counts(patch)
        for schedule, by_layer in (("zbv", False), ("dualpipev", True)):
            chunks = shard(build_replicas(schedule, 1), by_layer)
            sizes = [sum(p.numel() for p in chunk.parameters()) for chunk in chunks]
            num_modules = len(chunks)
            if by_layer:
                num_modules = sum(len(one.layers) + (one.info.is_first or one.info.is_last) for one in chunks)
            counts.gathers.clear(), counts.reductions.clear()
            for num_steps in (1, 2):
                run(schedule, chunks, 3)
                assert len(counts.gathers) == len(counts.reductions) == num_steps * num_modules, schedule
            assert sum(counts.gathers) >= 2 * sum(sizes)
            counts.gathers.clear(), counts.reductions.clear()
            run(schedule, chunks, 3, forward_only=True)
            assert (len(counts.gathers), counts.reductions) == (num_modules, [])
            assert all(isinstance(p, DTensor) for chunk in chunks for p in chunk.parameters())


@on_ranks(4)
def test_few_chunks_are_gathered_at_a_time(rank: int) -> None:
    """As the plan has it, in bytes."""
    use_mesh(pp=2, dp=2)
    chunks = shard(build_replicas("interleaved_1f1b", 2, max_gathered_chunks=1))
    with gathered_bytes() as found:
        for _ in range(2):
            run("interleaved_1f1b", chunks, NUM_MICROBATCHES)
    plan = make_plan("interleaved_1f1b", 2, NUM_MICROBATCHES, 2)
    sizes = [0.0] * 4
    for chunk in chunks:
        # Each shard has as many rows.
        sizes[chunk.info.index] = sum(4 * p.numel() // len(p) * 2 * -(-len(p) // 2) for p in chunk.parameters())
    memory = plan.simulate(memory=StageBytes(saved=0, gathered=sizes, max_gathered=1)).memory
    assert memory is not None
    planned = memory[chunks[0].info.index].during.tolist()
    assert found == 2 * planned
    assert max(planned) < sum(sizes)


@on_ranks(2)
def test_mixed_precision(rank: int) -> None:
    """Computed in bfloat16, gradients of microbatches and replicas added in float32."""
    use_mesh(pp=1, dp=2)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    chunks = shard(build_replicas("zbv", 1), mp_policy=policy)
    run("zbv", chunks, 3, seed=parallel_state.get_data_parallel_rank())
    model = Stage(StageInfo(0, 1), NUM_LAYERS).bfloat16()
    gradients = []
    for replica in range(2):
        sums = [torch.zeros(p.shape) for p in model.parameters()]
        for batch in batches(3, replica):
            model.zero_grad()
            (loss_of(model(batch["tokens"], batch["seed"]), batch["labels"]) / 3).backward()
            for total, parameter in zip(sums, model.parameters()):
                total += parameter.grad
        gradients.append(sums)
    assert_same(chunks, dict(zip(dict(model.named_parameters()), mean_of_replicas(gradients))), "mixed")
    assert all(p.dtype == p.grad.dtype == torch.float32 for chunk in chunks for p in chunk.parameters())


class Odd(Stage):
    """With a layer that only the second replica uses, in some microbatches; one that nobody uses; a frozen one."""

    def __init__(self, info: StageInfo, **options: Any) -> None:
        super().__init__(info, NUM_LAYERS, **options)
        torch.manual_seed(5)
        self.idle = nn.Linear(3, 3)
        self.odd = nn.Linear(VOCABULARY, VOCABULARY)
        megapipe.weight_grad.convert(self.odd)
        if "1" in self.layers:
            self.layers["1"].requires_grad_(False)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        x = super().forward(tokens, seed)
        return x + self.odd(x) if self.info.is_last and seed >= 100 and seed % 2 else x


def replica_gradients(model: nn.Module, replica: int, num_calls: int = 1) -> list[Tensor | None]:
    model.zero_grad()
    for _ in range(num_calls):
        add_gradients(model, 4, replica)
    return [p.grad for p in model.parameters()]


@on_ranks(2)
def test_recomputed_unused_and_frozen(rank: int) -> None:
    """With a `reduce_dtype` a step in which a module was not run ended with an error of torch's."""
    use_mesh(pp=1, dp=2)
    replica = parallel_state.get_data_parallel_rank()
    policy = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    chunks = [Odd(info, deferred=True) for info in stages_for_rank("zbv")]
    for chunk in chunks:
        chunk.config.recompute = "all"
        fully_shard(chunk.odd, mesh=parallel_state.get_data_parallel_mesh(), **policy)
    shard(chunks, **policy)
    model = Odd(StageInfo(0, 1), deferred=True)
    gradients = [replica_gradients(model, one) for one in range(2)]
    expected = dict(zip(dict(model.named_parameters()), mean_of_replicas(gradients)))
    for step in range(2):
        run("zbv", chunks, 4, seed=replica)
        if step == 1:  # twice into the same gradients
            expected = {name: None if grad is None else 2 * grad for name, grad in expected.items()}
        for chunk in chunks:
            not_here = {} if chunk.info.is_last else {"odd.weight": None, "odd.bias": None}
            assert_same([chunk], expected | not_here, "zbv")


@pytest.mark.skipif(not hasattr(FSDPModule, "finalize_backward"), reason="this torch can do it")
@on_ranks(2)
def test_what_torch_cannot_do_is_refused(rank: int) -> None:
    """Chunks that share streams and buffers: torch forgets the order of all forwards when one of them is reduced."""
    use_mesh(pp=1, dp=2)
    chunks = shard(build_replicas("interleaved_1f1b", 1))
    torch.distributed.fsdp.share_comm_ctx(chunks)
    with pytest.raises(ValueError, match="do not call share_comm_ctx for the chunks of a pipeline"):
        run("interleaved_1f1b", chunks, 3)
    start_again()
    # Torch's public end of a step cannot leave the sum over replicas for later, so that is refused.
    use_mesh(pp=1, dp_replicate=2, dp_shard=1)
    chunks = shard(build_replicas("1f1b", 1))
    chunks[0].set_requires_all_reduce(False)
    with pytest.raises(ValueError, match=r"set_requires_all_reduce\(False\).*use set_requires_gradient_sync\(False\)"):
        run("1f1b", chunks, 3)


@on_ranks(2)
def test_accumulated_over_calls(rank: int) -> None:
    """Over two calls, reduced in the second: as one call would with the microbatches of both."""
    use_mesh(pp=1, dp=2)
    replica = parallel_state.get_data_parallel_rank()
    chunks = shard(build_replicas("zbv", 1))
    for is_last in (False, True):
        for chunk in chunks:
            chunk.set_requires_gradient_sync(is_last)
            chunk.set_reshard_after_backward(is_last)
        run("zbv", chunks, 4, seed=replica)
    model = Stage(StageInfo(0, 1), NUM_LAYERS)
    gradients = [replica_gradients(model, one, num_calls=2) for one in range(2)]
    expected = dict(zip(dict(model.named_parameters()), mean_of_replicas(gradients)))
    assert_same(chunks, expected, "accumulated")


@pytest.mark.parametrize("forward_only", [False, True])
@on_ranks(1)
def test_a_step_after_one_that_failed(rank: int, forward_only: bool) -> None:
    """On one rank the next step may be right. Its gradients stayed whole, where no optimizer looks for them."""
    use_mesh(pp=1, dp=1)
    (chunk,) = shard(build_replicas("1f1b", 1), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    sharded = list(chunk.parameters())
    with pytest.raises(ValueError, match="data_iterator ended at microbatch 3 of 4"):
        run("1f1b", chunk, 4, data_iterator=batches(3), forward_only=forward_only)
    run("1f1b", chunk, 4)
    for parameter, wanted in zip(sharded, replica_gradients(Stage(StageInfo(0, 1), NUM_LAYERS), 0)):
        assert torch.equal(full(parameter.grad), wanted)


@pytest.mark.skipif(hasattr(FSDPModule, "finalize_backward"), reason="this torch cannot do it")
@on_ranks(2)
def test_reduced_in_part_first(rank: int) -> None:
    """A gradient of the first call was lost, of a layer that the second does not use: FSDP2 has its sum aside."""
    use_mesh(pp=1, dp_replicate=2, dp_shard=1)
    (chunk,) = [Odd(info) for info in stages_for_rank("1f1b")]
    fully_shard(chunk.odd, mesh=parallel_state.get_data_parallel_mesh())
    shard([chunk])
    for seed in (1 + rank, 0):
        chunk.set_requires_all_reduce(seed == 0)
        run("1f1b", [chunk], 4, seed=seed)
    model, gradients = Odd(StageInfo(0, 1)), []
    for replica in range(2):
        model.zero_grad()
        for seed in (1 + replica, 0):
            add_gradients(model, 4, seed)
        gradients.append([p.grad for p in model.parameters()])
    for name, wanted in zip(dict(model.named_parameters()), mean_of_replicas(gradients)):
        grad = chunk.get_parameter(name).grad
        assert name.startswith("idle") or (grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(full(grad), wanted)


class Fsdp1(FullyShardedDataParallel):
    def __init__(self) -> None:
        nn.Module.__init__(self)


@on_ranks(2)
def test_mistakes(rank: int) -> None:
    use_mesh(pp=1, dp=2)
    mesh = parallel_state.get_data_parallel_mesh()

    def message(chunk: nn.Module, kind: type[Exception] = ValueError) -> str:
        """As a step begins."""
        with pytest.raises(kind, match=r".") as error:
            ShardedChunks.find([chunk], forward_only=False, is_reduced_elsewhere=False)
        return str(error.value)

    (chunk,) = build_replicas("no_pipelining", 1)
    fully_shard(chunk.layers["0"], mesh=mesh)
    assert "layers.1.norm.weight of chunk 0 is in no module of fully_shard" in message(chunk)
    run("no_pipelining", [chunk], 1, forward_only=True)
    chunk.config.finalize_model_grads_func = lambda models, tokens: None
    run("no_pipelining", [chunk], 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(type(chunk.layers["0"]._get_fsdp_state()), "_lazy_init")
        expected = f"fully_shard of torch {torch.__version__} is not as megapipe knows it"
        assert expected in message(chunk, RuntimeError)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(FSDPModule, "finalize_backward", raising=False)
        patch.setattr(torch, "__version__", TorchVersion("2.99.1"))
        expected = "fully_shard of torch 2.99.1 is not as megapipe knows it (there is no finalize_backward): use torch"
        assert expected in message(chunk, RuntimeError)
    chunk.wrapped = Fsdp1()
    # It said that deferred weight gradients were in its way, but torch's error comes under gpipe too.
    assert "chunk 0 holds a FullyShardedDataParallel, which frees its whole parameters behind every" in message(chunk)

    (chunk,) = build_replicas("no_pipelining", 1)
    whole = nn.Sequential(fully_shard(chunk, mesh=mesh), nn.Linear(2, 2))
    fully_shard(whole, mesh=mesh)._get_fsdp_state()._lazy_init()
    assert "FSDPStage is part of another module of fully_shard: call fully_shard on each chunk" in message(chunk)


@on_ranks(1)
def test_a_captured_stage_of_sharded_layers_is_refused(rank: int) -> None:
    use_mesh(pp=1, dp=1)
    chunk = capture(nn.Sequential(nn.Linear(2, 2)), (torch.ones(1, 2),))
    fully_shard(chunk[0], mesh=parallel_state.get_data_parallel_mesh())
    with pytest.raises(ValueError, match=r"0\.weight is a shard.*call fully_shard on the stage only"):
        chunk(torch.ones(1, 2))
