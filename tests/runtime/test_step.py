"""A step as its caller sees it: what it is given, and the functions of the config around it."""

import contextlib
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.against import add_gradients, assert_same_gradients, mean_square, normal, step, unlabelled
from tools.models import batches, build, run
from tools.ranks import RankPool, on_ranks, start_again
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.utils.data import DataLoader

from megapipe import PipelineError, PipelineStage, parallel_state, stages_for_rank
from megapipe.plan import Schedule, Verbs, loop, make_plan
from megapipe.schedules import BW, F


def of_megatron(schedule: str) -> list[torch.nn.Module]:
    """Chunks for a schedule, which know which end of the model they have, as Megatron's do, and not which stage."""
    chunks = build(schedule, 2, 4)
    for chunk in chunks:
        chunk.pre_process, chunk.post_process = chunk.info.is_first, chunk.info.is_last
        del chunk.info
    return chunks


def complex_loss(iterator: Any, chunk: torch.nn.Module) -> Any:
    return chunk(next(iterator)["tokens"]), lambda output: (output.mean() * 1j, None)


def moves(pipe: Verbs) -> Any:
    """GPipe that moves what F saves to host memory and back, by no plan."""
    for _ in range(pipe.num_microbatches):
        F(pipe)
    for number in range(pipe.num_microbatches):
        pipe.run("O", 0, number)
        pipe.run("L", 0, number)
        BW(pipe)
    return pipe.finish()


WRONG_CALLS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("1f1b", "1f1b", {"forward_step_func": "forward_step"}, "forward_step_func must be callable, got a str"),
    ("1f1b", "1f1b", {"model": None}, "a list of its chunks, got a NoneType"),
    ("1f1b", "1f1b", {"model": []}, "a list of its chunks, got an empty list"),
    ("zbv", "zbv", {"data_iterator": [*batches(2)] * 2}, "data_iterator is a list of 4 but there are 2 chunks"),
    ("zbv", "zbv", {"data_iterator": DataLoader([*batches(2)])}, "is a DataLoader, not an iterator: pass iter"),
    ("interleaved_1f1b", "zbv", {}, r"made for stage [23] of 4, but the schedule runs it as stage [32] of 4"),
    ("dualpipev", "zbv", {}, ""),
    ("megatron's interleaved_1f1b", "zbv", {}, "made with post_process=False, but .* stage 3 .*build_model_chunks"),
    ("1f1b", "1f1b", {"forward_step_func": complex_loss}, "must be a real tensor of one element, but it is a complex"),
    ("1f1b", make_plan("inference", 2, 2), {}, r"inference \[\w+\] is a plan without backwards: pass forward_only"),
    ("1f1b", Schedule("moves", moves, loop), {}, "runs O, but activations are not offloaded"),
]
"""What chunks are made for, the schedule that runs them, with which arguments, and what is said of it, if anything."""


@on_ranks(2)
def test_calls_that_cannot_be(rank: int) -> None:
    """Chunks of another schedule were trained as stages that they are not, a DataLoader for two chunks began anew in
    each step; a complex loss and a plan without backwards trained nothing."""
    for made_for, schedule, arguments, message in WRONG_CALLS:
        chunks = of_megatron(made_for[11:]) if "megatron" in made_for else build(made_for, 2, 4)
        arguments = {"model": chunks, "num_microbatches": 2} | arguments
        if not message:
            run(schedule, **arguments)
            continue
        with pytest.raises((TypeError, ValueError, PipelineError), match=message):
            run(schedule, **arguments)
        start_again()


def wrapped_by_torch(rank: int) -> int:
    """Two replicas of a pipeline of one rank, kept in step by torch's DistributedDataParallel."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    (chunk,) = build("no_pipelining", 1, 2)
    calls = 0

    def count(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        nonlocal calls
        calls += 1
        return default_hooks.allreduce_hook(None, bucket)

    model = torch.nn.parallel.DistributedDataParallel(chunk)
    model.register_comm_hook(None, count)
    chunk.config.no_sync_func = model.no_sync
    run("no_pipelining", model, 3, seed=rank)
    grads = [torch.empty_like(chunk.head.weight) for _ in range(2)]
    dist.all_gather(grads, chunk.head.weight.grad)
    assert torch.equal(*grads)
    return calls


def test_no_sync_of_torchs_data_parallelism(ranks: RankPool) -> None:
    """The last forward ran without synchronisation, and only the last backward with it. torch's
    DistributedDataParallel prepares its reduction in the forward, so that nothing was ever reduced."""
    assert ranks.run(2, wrapped_by_torch) == [1, 1]


@on_ranks(2)
def test_torchs_data_parallelism_is_refused(rank: int) -> None:
    """It reduced nothing on stages whose last forward is followed by other backwards than its own, and their replicas
    drifted apart in silence: in pipelines, and on one rank where the schedule has other passes in between."""
    for schedule in ("gpipe", "zbv"):
        parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
        chunks = build(schedule, 1, 4, deferred=True)
        wrapped = [torch.nn.parallel.DistributedDataParallel(chunk) for chunk in chunks]
        with pytest.raises(ValueError, match=r"DistributedDataParallel \(2\) .* would not reduce .*GradientReducer"):
            run(schedule, wrapped, 3)
        start_again()
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    run("zbv", wrapped, 3, forward_only=True)


class Later(torch.nn.Linear):
    """Leaves its weight gradient to `backward_dw`, as transformer-engine's layers do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = torch.nn.functional.linear(x, self.weight.detach(), self.bias)
        output.register_hook(lambda grad: vars(self).setdefault("left", []).append((grad, x.detach())))
        return output

    def backward_dw(self) -> None:
        grad, x = self.left.pop(0)
        self.weight.grad = grad.t() @ x


@on_ranks(2)
def test_modules_within_chunks_are_exchanged_between_steps(rank: int) -> None:
    """The steps went on as before: layers that defer weight gradients by themselves never got them, and torch's
    DistributedDataParallel within a PipelineStage was not refused and reduced nothing."""
    import torch.distributed.fsdp  # what is imported in between is seen

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=1)
    data = unlabelled(normal(3, 4, seed=number) for number in range(3))
    (info,) = stages_for_rank("gpipe")
    chunk, whole = (PipelineStage(torch.nn.Sequential(torch.nn.Linear(4, 4)), info) for _ in range(2))
    whole.load_state_dict(chunk.state_dict())
    step("gpipe", chunk, data, mean_square)
    chunk.zero_grad()
    chunk.module[0].__class__ = Later
    step("gpipe", chunk, data, mean_square)
    add_gradients([whole.module], data, mean_square)
    assert_same_gradients([chunk], whole.module)
    chunk.module[0].__class__ = torch.nn.Linear
    chunk.module = torch.nn.parallel.DistributedDataParallel(chunk.module)
    with pytest.raises(ValueError, match=r"DistributedDataParallel \(2\) .* would not reduce"):
        step("gpipe", chunk, data, mean_square)


@on_ranks(1)
def test_a_chunk_without_trainable_parameters_under_no_sync(rank: int) -> None:
    """After a chunk's last W autograd passes by its parameters once more, for those who watch its nodes. With nothing
    to train in a chunk there was nothing to pass by, and the step failed with autograd's words for that."""
    for schedule in ("zb1p", "zbv"):
        chunks = build(schedule, 1, 4, deferred=True, no_sync_func=contextlib.nullcontext)
        chunks[0].requires_grad_(False)
        run(schedule, chunks, 2)


SETTINGS_THAT_CANNOT_BE: list[tuple[dict[str, Any], str]] = [
    ({"timeout": -5.0}, "config.timeout must be more than 0 and at most 1e9 seconds (30 years), got -5"),
    ({"context_parallel_size": 2}, "a sequence of 5 cannot be shared by 2 ranks (context_parallel_size 2"),
    ({"no_sync_func": [contextlib.nullcontext]}, "config.no_sync_func is a list of 1 but there are 2 chunks"),
    ({"grad_sync_func": []}, "config.grad_sync_func is a list of 0 but there are 2 chunks"),
    ({"param_sync_func": [list] * 3}, "config.param_sync_func is a list of 3 but there are 2 chunks"),
]
"""Of configs that are any object; tests/test_config.py has those that a PipelineConfig refuses itself."""


@on_ranks(2)
def test_settings_that_cannot_be(rank: int) -> None:
    """A list with a function too few failed in the middle of the step, or held back the synchronisation of the wrong
    chunk. A negative time limit left ranks waiting; a sequence that its ranks cannot share was cut short."""
    for options, message in SETTINGS_THAT_CANNOT_BE:
        chunks = build("zbv", 2, 4)
        for chunk in chunks:
            vars(chunk.config).update(options)
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            run("zbv", chunks, 2)
    chunks = build("zbv", 2, 4)
    vars(chunks[1].config).update(max_in_flight=3)
    with pytest.raises(ValueError, match="max_in_flight is 3 for one of this rank's chunks and None for the first"):
        run("zbv", chunks, 2)
