"""Pipelines on GPUs. On a machine with fewer GPUs than ranks, the ranks share them; without any, the same tests run on
the CPU, so that the first GPU finds tests that work."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tools import against
from tools.against import Received
from tools.failing import wait_for_failure
from tools.graphs import skip_without_tracer
from tools.models import BATCH, HIDDEN, SEQUENCE, Stage, batches, build, loss_of, reference, run
from tools.ranks import RankPool, on_ranks, start_again
from tools.replicas import reduced
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megapipe
from megapipe import (
    PipelineError,
    StageInfo,
    TimelineRecorder,
    distribute_layers,
    parallel_state,
    stages_for_rank,
    weight_grad,
)
from megapipe.checkpoint import Checkpointer
from megapipe.graph import capture
from megapipe.plan import Settings, make_plan
from megapipe.weight_grad import DeferredGrads

IS_GPU = torch.cuda.is_available()
SCHEDULES = [name for name in megapipe.schedule_names() if name not in ("no_pipelining", "inference")]
KINDS = ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"]
NUM_LAYERS = 8 if IS_GPU else 4
MOST = 8 if IS_GPU else 4
"""Microbatches of a step that moves much."""
TRANSPORT: dict[str, Any] = {}
ALL = [*((2, name) for name in SCHEDULES), *((4, name) for name in KINDS)]
CASES = ALL if IS_GPU else [(2, "zbv"), (4, "1f1b")]  # tests/runtime has all of them on the CPU
needs_gpu = pytest.mark.skipif(not IS_GPU, reason="needs a GPU")


def device_of(rank: int) -> torch.device:
    if not IS_GPU:
        return torch.device("cpu")
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = False
    return device


def on_device(rank: int, schedule: str, pp_size: int, **options: Any) -> list[Stage]:
    return [chunk.to(device_of(rank)) for chunk in build(schedule, pp_size, NUM_LAYERS, **TRANSPORT, **options)]


def data(rank: int, num_microbatches: int, seed: int) -> Iterator[dict[str, Any]]:
    """On the device before the step, as a data loader has it."""
    device = device_of(rank)
    placed = [
        {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        for batch in batches(num_microbatches, seed)
    ]
    return iter(placed)


def step(rank: int, schedule: str, chunks: Any, num_microbatches: int = 5, seed: int = 0, **options: Any) -> list[Any]:
    batch = data(rank, num_microbatches, seed)
    return run(schedule, chunks, num_microbatches, data_iterator=batch, **options)


@contextlib.contextmanager
def no_host_wait() -> Iterator[None]:
    """Raises where the host waits for the device, unless messages go by way of it, as ranks share a GPU."""
    is_shared = torch.cuda.device_count() < dist.get_world_size()
    if not IS_GPU or (is_shared and TRANSPORT.get("p2p_transport") != "nccl"):
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


whole_model = functools.cache(reference)


def assert_close_to_whole_model(
    chunks: list[Stage], num_microbatches: int, seeds: tuple[int, ...] = (0,)
) -> list[Tensor]:
    """Not equal: a GPU adds products up in another order than a CPU. Returns the whole model's losses."""
    whole, losses = whole_model(NUM_LAYERS, num_microbatches, seeds)
    expected = dict(whole.named_parameters())
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), expected[name].grad, rtol=1e-4, atol=1e-6)
    return losses


@pytest.mark.parametrize(("num_ranks", "schedule"), CASES)
@on_ranks()
def test_gradients_of_the_whole_model(rank: int, num_ranks: int, schedule: str) -> None:
    chunks = on_device(rank, schedule, num_ranks, deferred=True)
    step(rank, schedule, chunks)  # connects, and looks once at what it is given
    step(rank, schedule, chunks, forward_only=True)
    batch = data(rank, 5, 1)
    with no_host_wait():
        run(schedule, chunks, 5, data_iterator=batch)
    assert_close_to_whole_model(chunks, 5, (0, 1))


MOVED: list[tuple[float | None, int]] = [(None, 0), (0.3, 0), (0.3, 2**20)]
"""How long a copy takes, and the smallest tensors that are moved."""


@on_ranks(2)
def test_activations_in_host_memory(rank: int) -> None:
    """Copies run beside the step, so that the host waits for none of them; and small tensors stay."""
    gradients = []
    for copying, smallest in MOVED:
        chunks = on_device(rank, "zbv", 2, deferred=True, offload_activations=copying)
        with mock.patch("megapipe.activations.offload.SMALLEST", smallest):
            step(rank, "zbv", chunks, MOST)
            batch = data(rank, MOST, 1)
            with no_host_wait():
                run("zbv", chunks, MOST, data_iterator=batch)
        assert_close_to_whole_model(chunks, MOST, (0, 1))
        gradients.append([parameter.grad.cpu() for chunk in chunks for parameter in chunk.parameters()])
    for kept, *moved in zip(*gradients):
        assert all(torch.equal(kept, one) for one in moved)


def captured_stages(rank: int, compile_: str | None) -> None:
    chunks = on_device(rank, "zbv", 2)
    (batch,) = data(rank, 1, 0)
    for chunk in chunks:
        received = None if chunk.info.is_first else torch.empty(SEQUENCE, BATCH, HIDDEN, device=device_of(rank))
        capture(chunk, (batch["tokens"],), input_tensor=received, compile=compile_)

    def forward_step(data_iterator: Iterator[dict[str, Any]], model: nn.Module) -> Any:
        batch = next(data_iterator)
        return model(batch["tokens"]), lambda output: (loss_of(output, batch["labels"]), None)

    for seed in range(2):
        step(rank, "zbv", chunks, seed=seed, forward_step_func=forward_step)
    assert_close_to_whole_model(chunks, 5, (0, 1))


@pytest.mark.parametrize("compile_", [None, "inductor"])
def test_captured_stages(ranks: RankPool, compile_: str | None) -> None:
    skip_without_tracer()
    if not IS_GPU and compile_ is not None:
        pytest.skip("tests/graph compiles on the CPU")
    ranks.run(2, captured_stages, compile_)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(64, 3 * 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, -1).permute(2, 1, 3, 0, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.proj(mixed.permute(2, 0, 1, 3).reshape(x.shape))


def test_captured_attention_in_bfloat16() -> None:
    """On a GPU attention returns other things beside tensors."""
    skip_without_tracer()
    device = device_of(0)
    torch.manual_seed(0)
    eager = Attention().to(device)
    x = torch.randn(128, 2, 64, device=device)
    gradients = []
    with torch.autocast(device.type, torch.bfloat16):
        captured = capture(copy.deepcopy(eager), (x.clone().requires_grad_(),))
    for model in (eager, captured):
        mine, deferred = x.clone().requires_grad_(), DeferredGrads()
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(mine).float().square().mean()
        with deferred:
            loss.backward()
        assert (model.qkv.weight.grad is None) == (model is captured)  # W is to come
        deferred.run()
        gradients.append([mine.grad, *(parameter.grad for parameter in model.parameters())])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-5)


@on_ranks(2)
def test_bfloat16_by_autocast(rank: int) -> None:
    for schedule in KINDS:
        chunks = on_device(
            rank, schedule, 2, deferred=True, enable_autocast=True, autocast_dtype=torch.bfloat16,
            variable_seq_lengths=True,
        )  # fmt: skip
        reports = step(rank, schedule, chunks)
        assert all(torch.isfinite(report["loss"]) for report in reports)
        assert all(torch.isfinite(p.grad).all() for chunk in chunks for p in chunk.parameters())


@on_ranks(2)
def test_optimizers_and_clipping(rank: int) -> None:
    def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=0.1)

    weights = []
    for is_post_validated in (False, True):
        chunks = on_device(rank, "zbv", 2, deferred=True)
        if is_post_validated:
            optimizer: Any = megapipe.PostValidatedOptimizer(chunks, sgd, 1.0)
            chunks[0].config.post_validated_optimizer = optimizer
        else:
            optimizer = megapipe.PipelinedOptimizer(chunks, sgd)
        for seed in range(3):
            step(rank, "zbv", chunks, seed=seed)
            if not is_post_validated:
                norm = megapipe.clip_grad_norm_(chunks, 1.0)
                assert math.isfinite(norm.item())
            optimizer.step()
            optimizer.zero_grad()
        if is_post_validated:
            optimizer.finalize()
        weights.append([parameter.detach().cpu() for chunk in chunks for parameter in chunk.parameters()])
    for clipped, validated in zip(*weights):
        assert torch.equal(clipped, validated)


@on_ranks(4)
def test_replicas(rank: int) -> None:
    chunks = on_device(rank, "zbv", 2, deferred=True)
    reduced(chunks)
    step(rank, "zbv", chunks, seed=parallel_state.get_data_parallel_rank())
    expected = dict(whole_model(NUM_LAYERS, 5, (0, 1))[0].named_parameters())
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), expected[name].grad / 2, rtol=1e-4, atol=1e-6)


@on_ranks(2)
def test_a_wait_for_the_whole_device_within_a_step(rank: int) -> None:
    """As Megatron's timers and autotuned kernels have it."""
    chunks = on_device(rank, "zbv", 2)
    for chunk in chunks:
        chunk.register_forward_pre_hook(lambda *_: torch.cuda.synchronize() if IS_GPU else None)
    step(rank, "zbv", chunks)
    assert_close_to_whole_model(chunks, 5)


@needs_gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
@on_ranks(1)
def test_a_whole_step_as_one_graph(rank: int, schedule: str) -> None:
    """Replayed on other numbers it gives their gradients."""
    chunks = on_device(rank, schedule, 1, deferred=True)
    step(rank, schedule, chunks)  # looks once at what it is given
    kept, others = (list(data(rank, 5, seed)) for seed in (0, 1))
    for chunk in chunks:
        chunk.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        reports = run(schedule, chunks, 5, data_iterator=iter(kept))
    for mine, other in zip(kept, others):
        mine["tokens"].copy_(other["tokens"])
        mine["labels"].copy_(other["labels"])
    for _ in range(2):  # the second one writes over what the first has left
        graph.replay()
    for report, loss in zip(reports, assert_close_to_whole_model(chunks, 5, (1,))):
        torch.testing.assert_close(report["loss"].cpu(), loss, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_a_failure_reaches_both_ranks(rank: int) -> None:
    chunks = on_device(rank, "zbv", 2)
    numbers = itertools.count()

    def fail(*_: Any) -> None:
        if rank == 1 and next(numbers) == 4:
            raise MemoryError

    for chunk in chunks:
        chunk.register_forward_pre_hook(fail)

    def steps() -> None:
        while True:
            step(rank, "zbv", chunks)

    begin = time.monotonic()
    with pytest.raises(MemoryError if rank else PipelineError):
        steps()
    assert time.monotonic() - begin < 60


@on_ranks(2)
def test_a_wait_runs_out(rank: int) -> None:
    limit = 5.0 if IS_GPU else 1.0  # within which NCCL connects, too
    chunks = on_device(rank, "1f1b", 2, timeout=limit)

    step(rank, "1f1b", chunks)
    for chunk in chunks if rank == 1 else []:
        chunk.register_forward_pre_hook(lambda *_: wait_for_failure())

    def steps() -> None:
        while True:
            step(rank, "1f1b", chunks)
            megapipe.clip_grad_norm_(chunks, 1.0)

    with pytest.raises(PipelineError, match=f"waited longer than {limit:g} s"):
        steps()


@needs_gpu
@on_ranks(2)
def test_a_step_leaves_nothing_in_memory(rank: int) -> None:
    for schedule in KINDS:
        chunks = on_device(rank, schedule, 2, deferred=True)
        for seed in range(3):
            step(rank, schedule, chunks, seed=seed)
        before = torch.cuda.memory_allocated()
        step(rank, schedule, chunks)
        assert torch.cuda.memory_allocated() <= before, schedule


@on_ranks(2)
def test_timeline(rank: int) -> None:
    recorder = TimelineRecorder(num_steps=2)
    chunks = on_device(rank, "1f1b", 2, record_timeline=recorder)
    for seed in range(3):
        step(rank, "1f1b", chunks, seed=seed)
    timeline = recorder.gather()
    assert len(timeline.steps) == 2
    for steps in timeline.steps:
        for one in steps:
            assert all(span.end >= span.start for span in one.spans)


@on_ranks(2)
def test_a_checkpoint_goes_on_under_another_schedule(rank: int, tmp_path: Path) -> None:
    def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.01)

    chunks = on_device(rank, "1f1b", 2)
    optimizer = megapipe.PipelinedOptimizer(chunks, adamw)
    step(rank, "1f1b", chunks)
    optimizer.step()
    Checkpointer(tmp_path, chunks, optimizer).save(1)
    others = on_device(rank, "zbv", 2)
    for parameter in (p for chunk in others for p in chunk.parameters()):
        nn.init.zeros_(parameter)
    loaded = Checkpointer(tmp_path, others, megapipe.PipelinedOptimizer(others, adamw)).load()
    assert loaded.step == 1
    whole = Stage(StageInfo(0, 1), NUM_LAYERS)
    plain = torch.optim.AdamW(whole.parameters(), lr=0.01)
    expected, _ = reference(NUM_LAYERS, 5)
    for mine, theirs in zip(whole.parameters(), expected.parameters()):
        mine.grad = theirs.grad
    plain.step()
    named = dict(whole.named_parameters())
    for chunk in others:
        for name, parameter in chunk.named_parameters():
            torch.testing.assert_close(parameter.detach().cpu(), named[name].detach(), rtol=1e-4, atol=1e-5)


TOKENS, WIDTH = (2048, 1024) if IS_GPU else (512, 144)
"""Messages of 8 MiB, which NCCL's buffers do not hold with one channel; without a GPU those of the stand-in."""
WAYS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "posted early": {"p2p_lookahead": 1},
    "offloaded": {"offload_activations": 0.3},
    "recomputed": {"recompute": "all"},
    "short of memory": {"p2p_lookahead": 1},
}
MAY_HANG = ["looped_bfs", "interleaved_zb1p", "zbv", "combined_zb1p"]
"""Short of memory, see docs/gpus.md."""


class WholeNumbers(Received):
    """Sums are exact, in whatever order they are added up: each output is one of few inputs."""

    def __init__(self, info: StageInfo, **config: Any) -> None:
        super().__init__(info, hidden_size=WIDTH, **config)
        self.layers = nn.ModuleDict()
        for layer in distribute_layers(4, info):
            generator = torch.Generator().manual_seed(layer)
            self.layers[str(layer)] = linear = weight_grad.Linear(WIDTH, WIDTH, bias=False)
            signs = torch.rand(WIDTH, WIDTH, generator=generator) - 0.5
            linear.weight.data.copy_(signs.sign() * (signs.abs() < 0.5 / WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.info.is_first else self.input_tensor
        for layer in self.layers.values():
            x = x + torch.relu(layer(x))
        return x


def signed_sum(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


@contextlib.contextmanager
def short_memory(device: torch.device) -> Iterator[None]:
    """Half more than the most that was needed so far, so that the allocator waits for the device. A quarter was too
    little now and then: it takes pieces of 20 MiB where it needs 8 or less."""
    if IS_GPU:
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        most = 1.5 * torch.cuda.max_memory_allocated() + 2**25
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total))
    try:
        yield
    finally:
        if IS_GPU:
            torch.cuda.set_per_process_memory_fraction(1.0)


def large_messages(rank: int, schedule: str) -> None:
    """Losses and gradients are those of the whole model on one device, to the last bit."""
    replica, num_replicas = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    drawn = [torch.randint(-1, 2, (TOKENS, 1, WIDTH), generator=torch.Generator().manual_seed(n)) for n in range(10)]
    device, infos = device_of(rank), stages_for_rank(schedule)
    batch = [(x.float().to(device), y.float().to(device)) for x, y in zip(drawn, drawn[1 + replica :])][:MOST]
    whole = [WholeNumbers(StageInfo(index, infos[0].num_stages)).to(device) for index in range(infos[0].num_stages)]
    losses = [loss.cpu() for loss in against.add_gradients(whole, batch, signed_sum)]
    expected = {name: p.grad.cpu() for stage in whole for name, p in stage.named_parameters()}
    for gradient in expected.values():
        dist.all_reduce(gradient, group=parallel_state.get_data_parallel_group())
    for way, config in WAYS.items():
        is_short = way == "short of memory"
        if not IS_GPU and ("p2p_lookahead" in config or (config and num_replicas > 1)):
            continue  # gloo posts none ahead, and tests/cases has all others on the CPU
        if is_short and (schedule in MAY_HANG or num_replicas > 1):  # FSDP2 needs its memory in other pieces
            continue
        chunks = [WholeNumbers(info, p2p_max_ctas=1, **TRANSPORT, **config).to(device) for info in infos]
        for chunk in chunks if num_replicas > 1 else []:
            fully_shard(chunk, mesh=parallel_state.get_data_parallel_mesh())
        with short_memory(device) if is_short else contextlib.nullcontext():
            for _ in range(2):  # the first one connects
                for chunk in chunks:
                    chunk.zero_grad()
                reports = against.step(schedule, chunks, batch, signed_sum, seq_length=TOKENS, micro_batch_size=1)
        is_last = any(info.is_last for info in infos)
        assert [loss.cpu() for loss in reports] == (losses if is_last else []), way
        for name, parameter in (one for chunk in chunks for one in chunk.named_parameters()):
            assert torch.equal(against.full(parameter.grad).cpu(), expected[name] / num_replicas), (way, name)


@pytest.mark.parametrize("schedule", SCHEDULES if IS_GPU else ["zbv"])
@on_ranks(2)
def test_large_messages(rank: int, schedule: str) -> None:
    """What no other test sends: messages that wait for their receives, in all ways to post these and to hold less."""
    parallel_state.initialize_model_parallel(2)
    large_messages(rank, schedule)


@needs_gpu
@on_ranks(2)
def test_what_is_in_host_memory_is_not_on_the_device(rank: int) -> None:
    """The most that a step has there is less by as many microbatches as in its plan."""
    parallel_state.initialize_model_parallel(2)
    device = device_of(rank)
    drawn = [torch.randint(-1, 2, (TOKENS, 1, WIDTH)).float().to(device) for _ in range(9)]
    batch, found = list(itertools.pairwise(drawn)), []
    for moved in (None, 1.0):
        config = {**TRANSPORT, "offload_activations": moved}
        chunks = [WholeNumbers(info, **config).to(device) for info in stages_for_rank("gpipe")]
        for _ in range(2):  # the first one connects, and makes gradients
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            against.step("gpipe", chunks, batch, signed_sum, seq_length=TOKENS, micro_batch_size=1)
        plan = make_plan("gpipe", 2, 8, settings=Settings(offload=moved))
        found.append((torch.cuda.max_memory_allocated() - before, plan.simulate().peak_activations[rank]))
    (kept, number), (less, smaller) = found
    saved = 3 * drawn[0].nbytes  # of two layers: what each relu returns, and the input of the second
    assert kept - less >= 0.8 * (number - smaller) * saved > 2 * saved


@pytest.mark.skipif(IS_GPU and torch.cuda.device_count() < 4, reason="NCCL wants a GPU for each rank")
@on_ranks(4)
def test_large_messages_of_sharded_replicas(rank: int) -> None:
    device = device_of(rank)
    start_again("cpu:gloo,cuda:nccl" if IS_GPU else "gloo")
    parallel_state.initialize_from_mesh(init_device_mesh(device.type, (2, 2), mesh_dim_names=("pp", "dp")))
    for schedule in KINDS if IS_GPU else ["zbv"]:
        large_messages(rank, schedule)
