"""Stages whose tensors torch's `parallelize_module` shares out among ranks: pp=2 x tp=2."""

import itertools
import re
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.tensor.debug
from tools.against import assert_same_gradients, full, gradients
from tools.models import BATCH, Stage, add_gradients, batches, loss_of, noting_products, run
from tools.ranks import RankPool, on_ranks
from tools.replicas import reduced
from tools.scripts import run_script
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import Embedding

from megapipe import StageInfo, TiedWeights, clip_grad_norm_, parallel_state, stages_for_rank
from megapipe.checkpoint import Checkpointer
from megapipe.chunks import gradient_like
from megapipe.graph import autograd_function, capture
from megapipe.overlap import in_segments

NUM_LAYERS, NUM_MICROBATCHES, SEQUENCE = 4, 3, 6


def parallelize(model: Stage, mesh: DeviceMesh, shares_logits: bool = False) -> Stage:
    """The sequence, the first dimension here, is shared out between layers, and so between stages."""
    for layer in model.layers.values():
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(layer, mesh, plan)
    if model.embedding is not None:
        parallelize_module(model.embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)))
    if model.head is not None:
        output_layouts = Shard(-1) if shares_logits else Replicate()
        style = ColwiseParallel(
            input_layouts=Shard(0), output_layouts=output_layouts, use_local_output=not shares_logits
        )
        parallelize_module(model.head, mesh, style)
    return model


def build(
    schedule: str, mesh: DeviceMesh, shares_logits: bool = False, num_layers: int = NUM_LAYERS, **options: Any
) -> list[Stage]:
    num_chunks = 2 if schedule == "interleaved_1f1b" else None
    config = {"sequence_parallel": mesh["tp"].size() > 1, "tensor_model_parallel_size": mesh["tp"].size()}
    stages = stages_for_rank(schedule, num_chunks=num_chunks)
    chunks = [Stage(info, num_layers, **config, **options) for info in stages]
    return [parallelize(chunk, mesh["tp"], shares_logits) for chunk in chunks] if mesh["tp"].size() > 1 else chunks


@pytest.fixture(autouse=True)
def fresh_ranks(ranks: RankPool) -> None:
    """Where DTensors take a mesh for an equal one of an earlier test, whose process groups are gone."""
    if not hasattr(torch.distributed.tensor.debug, "_clear_sharding_prop_cache"):
        ranks.stop()


def use_mesh(**shape: int) -> DeviceMesh:
    parallel_state.destroy_model_parallel()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    parallel_state.initialize_from_mesh(mesh)
    return mesh


def step(schedule: str, chunks: list[Stage], seed: int = 0) -> list[Any]:
    data = batches(NUM_MICROBATCHES, seed, [SEQUENCE] * NUM_MICROBATCHES)
    return run(schedule, chunks, NUM_MICROBATCHES, data_iterator=data, seq_length=SEQUENCE)


def reference(model: Stage, num_replicas: int = 1, seed: int = 0) -> dict[str, Tensor]:
    """The gradients of the whole model in a step without a pipeline."""
    for replica in range(num_replicas):
        add_gradients(model, NUM_MICROBATCHES, seed + replica, [SEQUENCE] * NUM_MICROBATCHES)
    found = gradients(model)  # torch 2.9 would sum a Partial one before it divides it by one
    return {name: grad / num_replicas for name, grad in found.items()} if num_replicas > 1 else found


def assert_gradients(chunks: list[Stage], expected: dict[str, Tensor]) -> None:
    """Nearly those of the model on one rank, since sums over ranks are made in another order."""
    assert_same_gradients(chunks, expected, atol=1e-6)


@on_ranks(4)
def test_gradients_and_norms(rank: int) -> None:
    """Gradients are to the bit those of the model that is tensor-parallel, but in no pipeline. Ws run in windows while
    its collectives are under way, without a word in the model.

    Torch leaves that of an embedding shared out by rows whole on every rank. So the norm counted it once for each."""
    mesh = use_mesh(pp=2, tp=2)
    on_one_rank = reference(Stage(StageInfo(0, 1), NUM_LAYERS))
    norm = torch.nn.utils.get_total_norm(list(on_one_rank.values()))
    in_no_pipeline = reference(parallelize(Stage(StageInfo(0, 1), NUM_LAYERS), mesh["tp"]))
    for schedule, weights_per_window in (("interleaved_1f1b", 0), ("zbv", 1)):
        chunks = build(schedule, mesh, deferred=True)
        for chunk in chunks:
            chunk.config.weights_per_window = weights_per_window
            chunk.config.min_pending_weights = int(schedule == "zbv")
        with noting_products() as products:
            step(schedule, chunks)
        num_linears = NUM_MICROBATCHES * sum(2 * len(chunk.layers) for chunk in chunks)
        assert (sum(products) >= num_linears // 2) == bool(weights_per_window)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                assert isinstance(parameter, DTensor)
                assert torch.equal(parameter.grad.to_local(), in_no_pipeline[name].to_local()), (schedule, name)
        assert_gradients(chunks, on_one_rank)
        torch.testing.assert_close(clip_grad_norm_(chunks, 0.1).float(), norm)
    assert_gradients(chunks, {name: grad * (0.1 / norm) for name, grad in on_one_rank.items()})


@on_ranks(2)
def test_a_loss_that_is_shared_out(rank: int) -> None:
    """The logits stay shared out along the vocabulary; the loss is computed from the parts, forward and backward."""
    model = Stage(StageInfo(0, 1), 2)
    whole_losses = add_gradients(model, NUM_MICROBATCHES, 0, [SEQUENCE] * NUM_MICROBATCHES)
    chunks = build("zbv", use_mesh(pp=1, tp=2), num_layers=2, deferred=True, shares_logits=True)
    with loss_parallel():
        losses = step("zbv", chunks)
    assert_gradients(chunks, gradients(model))
    torch.testing.assert_close([full(loss["loss"]) for loss in losses], whole_losses, rtol=0, atol=1e-6)


@on_ranks(4)
def test_tied_weights(rank: int) -> None:
    mesh = use_mesh(pp=2, tp=2)
    model = Stage(StageInfo(0, 1), 2)
    model.head.weight.data.copy_(model.embedding.weight)
    expected = reference(model)
    expected["embedding.weight"] = expected["head.weight"] = expected["embedding.weight"] + expected["head.weight"]
    norm = torch.nn.utils.get_total_norm([grad for name, grad in expected.items() if name != "head.weight"])
    chunks = build("1f1b", mesh, num_layers=2)
    tied = TiedWeights(chunks, ["embedding.weight", "head.weight"])
    step("1f1b", chunks)
    tied.sum_gradients()
    assert_gradients(chunks, expected)
    torch.testing.assert_close(clip_grad_norm_(chunks, 0.1).float(), norm)


@on_ranks(2)
def test_tied_weights_that_are_shared_out_otherwise(rank: int) -> None:
    """Shares of rows were added to shares of columns where both had the same size."""
    (chunk,) = build("1f1b", use_mesh(pp=1, tp=2))
    torch.manual_seed(0)
    chunk.other = Embedding(*chunk.embedding.weight.shape)
    parallelize_module(chunk.other, use_mesh(pp=1, tp=2)["tp"], ColwiseParallel())
    with pytest.raises(ValueError, match=r"tied parameters must be alike, .*S.* of float32.*; other\.weight is "):
        TiedWeights([chunk], ["embedding.weight", "other.weight"])


def test_the_script_trains(ranks: RankPool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "tensor_parallel.md").read_text()
    (script,) = re.findall(r"```python\n(.+?)```", page, flags=re.DOTALL)
    for shown, smaller in (("= 32, 16, 2, 8", "= 32, 16, 2, 4"), ("range(20)", "range(2)")):
        assert shown in script
        script = script.replace(shown, smaller)
    printed, *_ = ranks.run(4, run_script, script)
    losses = [float(line.split()[-1]) for line in printed.splitlines()]
    assert len(losses) == 2
    assert losses[1] < losses[0]


@on_ranks(4)
def test_replicas(rank: int) -> None:
    """GradientReducer took every DTensor for one of fully_shard's and left it alone, so that replicas drifted apart.

    Of what is sharded on top, sums over tensor-parallel ranks were made by the thread that reduces gradients, and by
    the main thread's backwards, in an order that differed between ranks. So they waited for each other for ever."""
    check_both(pp_size=1)


def check_both(rank: int = 0, pp_size: int = 2) -> None:
    for name in ("dp", "dp_shard"):
        check_replicas(use_mesh(pp=pp_size, **{name: 2}, tp=2), name)


def check_replicas(mesh: DeviceMesh, name: str) -> None:
    num_layers = 2 * mesh["pp"].size()
    expected = reference(Stage(StageInfo(0, 1), num_layers), num_replicas=2)
    norm = torch.nn.utils.get_total_norm(list(expected.values()))
    chunks = build("zbv", mesh, num_layers=num_layers, deferred=True)
    if name == "dp":
        reduced(chunks)
    for module in (one for chunk in chunks for one in (*chunk.layers.values(), chunk) if name == "dp_shard"):
        fully_shard(module, mesh=mesh[name])
    step("zbv", chunks, seed=mesh[name].get_local_rank())
    assert_gradients(chunks, expected)
    torch.testing.assert_close(clip_grad_norm_(chunks, 0.1).float(), norm)


@pytest.mark.soak
def test_replicas_of_tensor_parallel_pipelines(eight_ranks: RankPool) -> None:
    """pp=2 x dp=2 x tp=2, with gradients reduced and with sharded weights."""
    eight_ranks.run(8, check_both)


def weights_and_states(chunks: list[Stage], optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    found = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            found[name] = full(parameter.detach())
            found.update({f"{key} of {name}": full(value) for key, value in optimizer.state[parameter].items()})
    return found


@on_ranks(2)
def test_checkpoints_of_other_sizes(rank: int, tmp_path: Path) -> None:
    """Weights, and the state of AdamW, from tp=2 to 1 and back."""
    found: list[dict[str, Tensor]] = []
    for pp_size, tp_size in ((1, 2), (2, 1), (1, 2)):
        chunks = build("1f1b", use_mesh(pp=pp_size, tp=tp_size), num_layers=2)
        optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-2)
        checkpointer = Checkpointer(tmp_path, chunks, optimizer)
        if found:
            checkpointer.load()
        else:
            step("1f1b", chunks)
            optimizer.step()
        checkpointer.save(len(found) + 1)
        found.append(weights_and_states(chunks, optimizer))
    for saved, loaded in itertools.pairwise(found):
        both = saved.keys() & loaded.keys()
        assert any("exp_avg_sq of" in name for name in both)
        for name in both:
            assert torch.equal(saved[name], loaded[name]), name


# Captured


def capture_one(chunk: Stage, recompute: bool) -> None:
    rows = torch.zeros(SEQUENCE, BATCH, dtype=torch.long)
    received = None if chunk.embedding is not None else torch.zeros(SEQUENCE // 2, BATCH, chunk.config.hidden_size)
    capture(chunk, (rows,), input_tensor=received, recompute=recompute)


def captured_step(schedule: str, chunks: list[Stage], call: Any = torch.nn.Module.__call__) -> None:
    """Their seeds are a part of the graph."""

    def forward_step(iterator: Any, chunk: Stage) -> Any:
        batch = next(iterator)
        return call(chunk, batch["tokens"]), lambda output: ((loss := loss_of(output, batch["labels"])), loss.detach())

    data = batches(NUM_MICROBATCHES, 0, [SEQUENCE] * NUM_MICROBATCHES)
    options = {"data_iterator": data, "seq_length": SEQUENCE, "forward_step_func": forward_step}
    run(schedule, chunks, NUM_MICROBATCHES, **options)


@on_ranks(2)
def test_captured_stages(rank: int) -> None:
    """Their graphs have the collectives, B and W are split, and products of Ws run in the windows. As one graph of a
    pair, a forward and a backward compute while the other's data is under way. The second stage is recomputed."""
    mesh = use_mesh(pp=1, tp=2)
    in_no_pipeline = parallelize(Stage(StageInfo(0, 1), 2), mesh["tp"])
    reference(in_no_pipeline)
    expected = {name: gradient_like(parameter) for name, parameter in in_no_pipeline.named_parameters()}
    chunks = build("zbv", mesh, num_layers=2)
    for chunk in chunks:
        capture_one(chunk, recompute=chunk.info.is_last)
    for schedule, weights_per_window in (("zbv", 0), ("zbv", 1), ("dualpipev", 1)):
        for chunk in chunks:
            chunk.zero_grad()
            chunk.config.weights_per_window = weights_per_window
            chunk.config.min_pending_weights = 1
        in_pairs = schedule == "dualpipev"
        with (
            noting_products() as products,
            mock.patch.object(autograd_function, "multiplex", side_effect=autograd_function.multiplex) as multiplexed,
        ):
            captured_step(schedule, chunks, in_segments if in_pairs else torch.nn.Module.__call__)
        assert multiplexed.called == in_pairs
        if schedule == "zbv":  # a graph leaves its own Ws at its end, so others have none
            assert any(products) == bool(weights_per_window)
        for chunk in chunks:
            for name, parameter in chunk.named_parameters():
                grad = gradient_like(parameter)
                assert grad.placements == parameter.placements
                assert torch.equal(grad.to_local(), expected[name].to_local()), (schedule, name)


@on_ranks(2)
def test_an_output_that_is_shared_out(rank: int) -> None:
    mesh = use_mesh(pp=1, tp=2)
    layer = parallelize_module(torch.nn.Linear(4, 4), mesh["tp"], ColwiseParallel(use_local_output=False))
    with pytest.raises(ValueError, match="it returns a DTensor, and stages hand over plain tensors"):
        capture(torch.nn.Sequential(layer), (torch.ones(2, 4),))
