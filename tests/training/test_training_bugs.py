"""What was once wrong around the schedule: optimizers, clipping and checkpoints together."""

from __future__ import annotations

import copy
import dataclasses
import math
import sys
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from models import build, run
from ranks import RankPool
from restarts import counting_restarts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, LinearLR, ReduceLROnPlateau, SequentialLR

from megapipe import (
    PipelinedGradScaler,
    PipelinedLRScheduler,
    PipelinedOptimizer,
    PostValidatedOptimizer,
    StageInfo,
    TiedWeights,
    clip_grad_norm_,
    divide_by_num_tokens,
    parallel_state,
)
from megapipe.checkpoint import Checkpointer, read_position, save_safetensors
from megapipe.plan import make_plan, place_weights
from megapipe.runtime import weight_tuning
from megapipe.training import GradientReducer, data_iterators, split_batch

EXAMPLES = Path(__file__).parents[2] / "examples"


def sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=0.1)


def validated(optimizer: PostValidatedOptimizer, chunks: list[Any]) -> PostValidatedOptimizer:
    chunks[0].config.post_validated_optimizer = optimizer
    return optimizer


def weights_of(chunks: list[Any]) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other))


def tuned_and_rolled_back(rank: int) -> int:
    original = weight_tuning.WeightTuner.choose

    def choose(schedule: Any, pp_size: int, m: int, chunks: int, settings: Any, costs: Any) -> Any:
        settings = dataclasses.replace(settings, max_in_flight=2.0)  # other than the config says
        plan = make_plan(schedule, pp_size, m, chunks, settings=settings)
        return weight_tuning.Choice(settings, place_weights(plan, costs, 6.0), 1.0, 2.0)

    weight_tuning.WeightTuner.choose = staticmethod(choose)
    weights = []
    try:
        for is_ordinary in (True, False):
            calls = 0

            def finalize(models: Any, tokens: Any) -> None:
                nonlocal calls
                calls += 1
                for parameter in (p for model in models for p in model.parameters()):
                    parameter.grad *= 100 if calls == 10 else 0.05

            options = {"weight_grad_placement": "tuned", "max_in_flight": 6, "timeout": 15}
            chunks = build("zb1p", 2, 4, deferred=True, finalize_model_grads_func=finalize, **options)
            optimizer = PipelinedOptimizer(chunks, sgd)
            if not is_ordinary:
                optimizer = validated(PostValidatedOptimizer(chunks, sgd, 0.5), chunks)
            with counting_restarts() as restarts:
                for step in range(12):
                    run("zb1p", chunks, 8, seed=step)
                    if is_ordinary:
                        clip_grad_norm_(chunks, 0.5)
                    optimizer.step()
                    optimizer.zero_grad()
            optimizer.finalize()
            weights.append(weights_of(chunks))
    finally:
        weight_tuning.WeightTuner.choose = original
    assert same(*weights)
    return len(restarts)


def test_a_tuned_step_that_is_rolled_back(ranks: RankPool) -> None:
    """Where to stop was read from the plan of the config, though the tuner had chosen another warmup. The ranks then
    waited for messages that were never to come."""
    assert ranks.run(2, tuned_and_rolled_back) == [1, 1]


def rates_resumed(rank: int, folder: str) -> None:
    def make() -> tuple[Any, ...]:
        chunks = build("1f1b", 2, 4)
        optimizer = PipelinedOptimizer(chunks, sgd, lambda name, _: {"lr": 1e-4} if "embedding" in name else {})
        return chunks, optimizer, PipelinedLRScheduler(optimizer, lambda one: LambdaLR(one, lambda step: 0.5**step))

    def train(chunks: Any, optimizer: Any, scheduler: Any) -> list[float]:
        run("1f1b", chunks, 2)
        optimizer.step()
        scheduler.step()
        return [group["lr"] for group in optimizer.param_groups]

    chunks, optimizer, scheduler = make()
    train(chunks, optimizer, scheduler)
    Checkpointer(folder, chunks, optimizer, others={"lr": scheduler}).save(1)
    expected = train(chunks, optimizer, scheduler)
    chunks, optimizer, scheduler = make()
    Checkpointer(folder, chunks, optimizer, others={"lr": scheduler}).load()
    assert train(chunks, optimizer, scheduler) == expected == scheduler.get_last_lr()
    assert len(expected) == 2 - rank


def test_learning_rates_of_each_rank_are_resumed(ranks: RankPool, tmp_path: Path) -> None:
    """The scheduler saved by rank 0 was loaded on all ranks with rank 0's learning rates, one per group. Ranks with
    other groups went on with wrong ones."""
    ranks.run(2, rates_resumed, str(tmp_path))


def checkpoints_of_open_steps(rank: int, folder: str) -> None:
    chunks = build("1f1b", 2, 4)
    optimizer = validated(PostValidatedOptimizer(chunks, sgd, 1e-3), chunks)
    checkpointer = Checkpointer(f"{folder}/whole", chunks, optimizer)
    checkpointer.save(0)
    saved = weights_of(chunks)
    run("1f1b", chunks, 2)
    optimizer.step()  # to be clipped, but nobody knows yet
    optimizer.zero_grad()
    assert optimizer.has_pending_step
    checkpointer.load()
    assert same(weights_of(chunks), saved)

    run("1f1b", chunks, 2)
    optimizer._waits = False
    optimizer.step()
    Checkpointer(f"{folder}/model", chunks).save(1)
    assert not optimizer.has_pending_step
    expected = weights_of(chunks)
    Checkpointer(f"{folder}/model", chunks).load()
    assert same(weights_of(chunks), expected)


def test_checkpoints_while_a_step_is_not_validated(ranks: RankPool, tmp_path: Path) -> None:
    """Loading finalized the step after the weights had been read, and rolled it back over them; saving without the
    optimizer saved weights that did not stand. Either way nothing was said."""
    ranks.run(2, checkpoints_of_open_steps, str(tmp_path))


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
    if hasattr(torch.cpu.Stream, "record_event"):  # else fully_shard of this torch does not run on CPU
        ranks.run(4, sharded_and_parallel)
    if torch.__version__ < "2.13":  # its DTensor takes a mesh for an equal one whose process groups are gone
        ranks.stop()
    ranks.run(2, partial_gradients)


def named_groups(rank: int, folder: str) -> None:
    parallel_state.initialize_model_parallel()
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    halves = []
    for name, layer in zip("01", layers):
        halves.append(nn.Module())
        halves[-1].add_module(name, layer)
    Checkpointer(folder, halves, [torch.optim.AdamW(half.named_parameters()) for half in halves]).save(1)
    whole = nn.Sequential(*layers)
    Checkpointer(folder, [whole], torch.optim.AdamW(whole.named_parameters())).load()


def test_optimizers_of_named_parameters(ranks: RankPool, tmp_path: Path) -> None:
    """The names that torch's optimizers may keep in their groups were saved as a setting. So no other arrangement of
    chunks could load them."""
    ranks.run(1, named_groups, str(tmp_path))


class Counting(torch.optim.SGD):
    """Keeps a count among its settings, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        super().step()


def counted(rank: int) -> None:
    chunks = build("1f1b", 2, 4)
    optimizer = validated(PostValidatedOptimizer(chunks, lambda groups: Counting(groups, lr=0.1), math.inf), chunks)
    for is_finite in (True, False):
        run("1f1b", chunks, 2)
        if not is_finite:
            next(chunks[0].parameters()).grad.fill_(math.nan)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.finalize()
    assert [group["k"] for group in optimizer.param_groups] == [optimizer.num_steps] == [1]


def test_what_an_optimizer_counts_is_rolled_back(ranks: RankPool) -> None:
    """A skipped step left in the groups what the step had put there."""
    ranks.run(2, counted)


def replicated_mesh(rank: int) -> None:
    names = ("pp", "dp_replicate", "dp_shard", "ep")
    parallel_state.initialize_from_mesh(init_device_mesh("cpu", (1, 2, 1, 1), mesh_dim_names=names))
    assert parallel_state.get_data_parallel_mesh().mesh_dim_names == ("dp_replicate", "dp_shard")


def test_a_mesh_with_one_rank_for_experts(ranks: RankPool) -> None:
    """It made the data-parallel mesh flat, so what was to be replicated was sharded."""
    ranks.run(2, replicated_mesh)


def given_otherwise(rank: int) -> None:
    """Weights rolled back where the schedule is given the chunks in another form than the optimizer."""
    weights = []
    for form in (list, nn.ModuleList):
        chunks = build("1f1b", 2, 2)
        optimizer = validated(PostValidatedOptimizer(form(chunks), sgd, 1e-3), chunks)
        for step in range(2):
            run("1f1b", form(chunks), 2, seed=step)
            optimizer._waits = False
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finalize()
        weights.append(weights_of(chunks))
    assert same(*weights)


def test_chunks_in_another_form(ranks: RankPool) -> None:
    """The schedule did not find the PostValidatedOptimizer of chunks that were given to it as a ModuleList. Steps that
    should have been clipped stood for one step more, silently."""
    ranks.run(2, given_otherwise)


def frozen(rank: int) -> None:
    """A stage without anything to train, weights that are unfrozen later, and a tied weight frozen in one place."""
    parameters = build("1f1b", 2, 4)
    if rank == 0:
        parameters[0].requires_grad_(False)
    for is_post_validated in (False, True):
        optimizer = PipelinedOptimizer(parameters, sgd)
        if is_post_validated:
            optimizer = validated(PostValidatedOptimizer(parameters, sgd, 1e-3), parameters)
        scheduler = PipelinedLRScheduler(optimizer, lambda one: LambdaLR(one, lambda n: 0.5**n))
        before = weights_of(parameters)
        for step in range(2):
            run("1f1b", parameters, 2, seed=step)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        optimizer.finalize()
        assert same(weights_of(parameters), before) == (rank == 0)
    parameters[0].requires_grad_(True)
    before = weights_of(parameters)
    run("1f1b", parameters, 2)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.finalize()
    assert not any(same([one], [other]) for one, other in zip(weights_of(parameters), before))
    assert all(parameter.grad is None for parameter in parameters[0].parameters())

    if rank == 0:
        parameters[0].embedding.requires_grad_(False)
    with pytest.raises(ValueError, match=r"tied parameters must be alike, but embedding.weight is frozen float32"):
        TiedWeights(parameters, ["embedding.weight", "head.weight"])


def test_frozen_stages(ranks: RankPool) -> None:
    """A rank whose stages were all frozen could make no optimizer, and the others waited for it; what was unfrozen
    later was never trained, silently. A tied weight that was frozen on one rank only made the other wait forever."""
    ranks.run(2, frozen)


def unfrozen_replicas(rank: int) -> None:
    chunks = build("no_pipelining", 1, 2)
    chunks[0].layers.requires_grad_(False)
    reducer = GradientReducer(chunks)
    chunks[0].config.grad_sync_func = reducer.start
    chunks[0].config.finalize_model_grads_func = reducer.finish
    run("no_pipelining", chunks, 2, seed=rank)
    chunks[0].layers.requires_grad_(True)
    with pytest.raises(ValueError, match=r"has no part in the GradientReducer.*make a new one"):
        run("no_pipelining", chunks, 2, seed=rank)


def test_replicas_of_what_is_unfrozen_later(ranks: RankPool) -> None:
    """A parameter that was frozen, or not there, when the GradientReducer was made was not averaged. The replicas
    drifted apart, silently."""
    ranks.run(2, unfrozen_replicas)


def cyclic(optimizer: Any) -> CyclicLR:
    rates = [group["lr"] for group in optimizer.param_groups]
    return CyclicLR(optimizer, [rate / 10 for rate in rates], rates, step_size_up=3, cycle_momentum=False)


def plateau(optimizer: Any) -> ReduceLROnPlateau:
    minima = [group["lr"] / 4 for group in optimizer.param_groups]
    return ReduceLROnPlateau(optimizer, patience=0, factor=0.7, min_lr=minima)


def schedulers_resumed(rank: int, folder: str) -> None:
    parallel_state.initialize_model_parallel(2)
    kinds: list[tuple[Any, bool]] = [(lambda one: LambdaLR(one, lambda step: 0.5**step), False), (plateau, False)]
    kinds += [(cyclic, is_pipelined) for is_pipelined in (False, True)]
    kinds += [(lambda one: SequentialLR(one, [LinearLR(one, 0.1, total_iters=2), cyclic(one)], [2]), True)]
    for number, (kind, is_pipelined) in enumerate(kinds):

        def make(number: int = number, kind: Any = kind, is_pipelined: bool = is_pipelined) -> tuple[Any, ...]:
            layer = nn.Linear(2, 2)
            chunk = nn.ModuleDict({str(rank): layer})
            optimizer = PipelinedOptimizer(
                [chunk], sgd, lambda _, p: {"lr": 1e-4 if rank + p.dim() == 1 else 0.1 + rank}
            )
            scheduler = PipelinedLRScheduler(optimizer, kind) if is_pipelined else kind(optimizer)
            return (
                optimizer,
                scheduler,
                Checkpointer(f"{folder}/{number}", [chunk], optimizer, others={"lr": scheduler}),
            )

        def train(optimizer: Any, scheduler: Any, num_steps: int = 3, kind: Any = kind) -> list[list[float]]:
            rates = []
            for _ in range(num_steps):
                for group in optimizer.param_groups:
                    for parameter in group["params"]:
                        parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                scheduler.step(*([1.0] if kind is plateau else []))
                rates.append([group["lr"] for group in optimizer.param_groups])
            return rates

        optimizer, scheduler, checkpointer = make()
        train(optimizer, scheduler)
        checkpointer.save(1)
        expected = train(optimizer, scheduler)
        optimizer, scheduler, checkpointer = make()
        checkpointer.load()
        assert train(optimizer, scheduler) == expected, number
        assert len(expected[0]) == 2 - rank
    with pytest.raises(TypeError, match="ReduceLROnPlateau steps by a metric"):
        PipelinedLRScheduler(optimizer, plateau)


def test_schedulers_of_other_groups_are_resumed(ranks: RankPool, tmp_path: Path) -> None:
    """torch's own schedulers took over rank 0's learning rates for its groups on every rank, and so did a CyclicLR its
    bounds; one behind another scheduler went on with a wrong lower bound. Later steps had wrong rates, or failed."""
    ranks.run(2, schedulers_resumed, str(tmp_path))


def test_a_scaler_that_is_switched_off() -> None:
    """It set up a scale on the device, though there is none where there is no such device."""
    assert PipelinedGradScaler("cuda", enabled=False).get_scale() == 1.0


def test_one_checkpoint_where_there_may_be_none(tmp_path: Path) -> None:
    """Given one checkpoint and not its run's folder, `load` with `may_be_empty` looked for others in it and found none.
    The run began anew, silently."""
    layer = nn.Linear(2, 2)
    Checkpointer(tmp_path, layer).save(1)
    assert Checkpointer(tmp_path, layer).load(tmp_path / "step_00000001", may_be_empty=True) == (1, None)


def test_damaged_and_foreign_checkpoints(tmp_path: Path) -> None:
    """Damaged files raised an EOFError without a word, or torch's advice to let them execute code; a checkpoint of
    somebody else's raised a KeyError. What was exported of one without a model was an empty file."""
    layer = nn.Linear(2, 2)
    Checkpointer(tmp_path, layer).save(1)
    (data,) = (tmp_path / "step_00000001").glob("*.distcp")
    whole = data.read_bytes()
    for content in (whole[:100], b"x" * len(whole), None):
        data.unlink() if content is None else data.write_bytes(content)
        with pytest.raises(ValueError, match=r"step_00000001 cannot be read \(\w+.*\): its files are damaged"):
            Checkpointer(tmp_path, layer).load()
    foreign = tmp_path / "foreign"
    torch.distributed.checkpoint.save({"weight": torch.ones(2)}, checkpoint_id=str(foreign))
    for call in (lambda: Checkpointer(tmp_path, layer).load(foreign), lambda: read_position(foreign)):
        with pytest.raises(ValueError, match=r"foreign has no run: .*Checkpointer"):
            call()
    with pytest.raises(ValueError, match=r"foreign holds no model"):
        save_safetensors(foreign, tmp_path / "exported")


def test_exporting_twice_into_one_folder(tmp_path: Path) -> None:
    """The files of an earlier export in another number of files stayed. transformers reads model.safetensors first, and
    so the old weights."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    Checkpointer(tmp_path / "run", layers).save(1)
    for size in (10**9, 300, 600, 10**9):
        paths = save_safetensors(tmp_path / "run", tmp_path / "model", max_file_size=size)
        index = {tmp_path / "model" / "model.safetensors.index.json"} if len(paths) > 1 else set()
        assert set((tmp_path / "model").iterdir()) == {*paths, *index}


class TwoArguments(Exception):  # noqa: N818
    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} {other}")


class Unloadable:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        if dist.get_rank():
            raise TwoArguments(1, 2)


def not_to_be_sent(rank: int, folder: str) -> None:
    chunks = build("1f1b", 2, 2)
    optimizer = PipelinedOptimizer(chunks, sgd)
    Checkpointer(folder, chunks, others={"other": Unloadable()}).save(1)
    with pytest.raises(RuntimeError, match=r"TwoArguments: 1 2"):
        Checkpointer(folder, chunks, others={"other": Unloadable()}).load()
    optimizer.param_groups[0]["rule"] = (lambda: 0) if rank else 0
    with pytest.raises(TypeError, match=r"cannot be sent to the other ranks \(.*lambda"):
        Checkpointer(folder, chunks, optimizer).save(2)


def test_errors_that_cannot_be_sent(ranks: RankPool, tmp_path: Path) -> None:
    """An exception that pickle cannot make again, or a setting that it cannot take, failed on one rank only. The others
    waited for it until they were killed."""
    ranks.run(2, not_to_be_sent, str(tmp_path))


def test_factored_state_of_parameters_in_parts(tmp_path: Path) -> None:
    """Optimizer state of another shape than its parameter is not cut into the parameter's parts, so every rank saved
    its own experts' under one name. All but one were lost, silently."""
    experts = nn.Module()
    experts.weight = nn.Parameter(torch.ones(2, 4, 4))
    optimizer = torch.optim.Adafactor(experts.parameters())
    experts.weight.grad = torch.ones(2, 4, 4)
    optimizer.step()
    parts = lambda name, _, tensor: [(f"{name}.{n}", part) for n, part in enumerate(tensor)]  # noqa: E731
    with pytest.raises(ValueError, match=r"row_var of weight .* \[2, 4, 1\].*cannot be saved in parts"):
        Checkpointer(tmp_path, experts, optimizer, parts=parts).save(1)


@dataclasses.dataclass
class Samples:
    tokens: Tensor


def test_batches_that_are_not_cut() -> None:
    """Arrays, and containers that torch's pytrees do not know, went into every microbatch as a whole: each sample was
    trained on once per microbatch. A name that the spec lacks was a KeyError."""
    tokens = torch.arange(4)
    for batch, what in (
        (UserDict(tokens=tokens), "batch is a UserDict"),
        ({"x": Samples(tokens)}, r"batch\['x'\] is a Samples"),
        ([tokens.numpy()], r"batch\[0\] is a ndarray"),
    ):
        with pytest.raises(ValueError, match=rf"{what}, which cannot be cut.*None in the spec"):
            split_batch(batch, 2)
        assert split_batch(batch, 2, None) == [batch, batch]
    assert split_batch({"x": tokens.numpy()[0], "y": tokens}, 2)[1]["x"] == 0
    with pytest.raises(ValueError, match=r"spec .* has no 'labels'"):
        data_iterators([], 2, [StageInfo(0, 1)], inputs=["tokens"], labels=["labels"], spec={"tokens": 0})


def pretrain_for_inference(rank: int) -> None:
    sys.path.insert(0, str(EXAMPLES))
    import pretrain_gpt

    parallel_state.initialize_model_parallel()
    args = pretrain_gpt.parse_args(["--schedule", "inference", "--hidden-size", "16", "--num-layers", "1"])
    with pytest.raises(ValueError, match="--schedule inference runs forwards only"):
        pretrain_gpt.Trainer(args, torch.device("cpu"))
    args = pretrain_gpt.parse_args(["--num-attention-heads", "3", "--hidden-size", "16", "--num-layers", "1"])
    with pytest.raises(ValueError, match="hidden_size=16 cannot be shared out evenly among 3 attention heads"):
        pretrain_gpt.Trainer(args, torch.device("cpu"))
    for option in ("eval-iters", "log-interval", "save-interval", "micro-batch-size"):
        with pytest.raises(SystemExit):
            pretrain_gpt.parse_args([f"--{option}", "0"])
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda needs a GPU"):
            pretrain_gpt.setup("cuda")


def test_options_of_the_example(ranks: RankPool) -> None:
    """Sizes and intervals of 0 were divisions by zero, --eval-iters 0 only after a hundred steps. Under --schedule
    inference nothing was trained, and what had not been trained was saved."""
    ranks.run(1, pretrain_for_inference)


def main_gradients(rank: int) -> None:
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


def test_gradients_that_others_accumulate(ranks: RankPool) -> None:
    """Layers add to `main_grad` where there is one, which the norm, its clipping and the sums over tied weights passed
    over. They took such a gradient for none, silently."""
    ranks.run(2, main_gradients)
