"""Sequences cut into slices: reports, data and messages, and what is refused. tests/cases has their gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cases import Case, Slices
from cases.stages import Stage, Unpartitioned, loss_and_report
from tools.against import assert_same_gradients, use_groups
from tools.models import BATCH, HIDDEN, batches
from tools.ranks import on_ranks
from torch import Tensor, nn

import megapipe
from megapipe import StageInfo, parallel_state, slices, stages_for_rank
from megapipe.analysis import load_timeline
from megapipe.graph import capture
from megapipe.plan import Action

CUT = Case("seq1f1b", 2, 3, [Slices([3, 2, 1])])


def forward_step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
    batch = next(data_iterator)

    def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Any]]:
        loss, report = loss_and_report(CUT, output, batch)
        return loss, {**report, "count": 1, "at": slices.current(), "parts": (loss.detach(),)}

    return model(batch["tokens"]), loss_func


def stage_of(info: StageInfo, **config: Any) -> Stage:
    stage = Stage(CUT, info)
    vars(stage.config).update({"hidden_size": HIDDEN, "sequence_slice_lengths": None, **config})
    return stage


def build(schedule: str, **config: Any) -> list[Stage]:
    use_groups()
    return [stage_of(info, **config) for info in stages_for_rank(schedule)]


def run(schedule: str, model: Any, m: int, lengths: Sequence[int], **options: Any) -> list[Any]:
    chunks = model if isinstance(model, list) else [model]
    chunks[0].config.num_sequence_slices = len(lengths)
    chunks[0].config.sequence_slice_lengths = lengths
    seq_length = sum(lengths)
    data = batches(m, 1, [seq_length] * m)
    arguments = {"forward_step_func": forward_step, "data_iterator": data, **options}
    sizes = {"num_microbatches": m, "seq_length": seq_length, "micro_batch_size": BATCH}
    return megapipe.get_forward_backward_func(schedule)(model=model, **sizes, **arguments)


def whole(m: int, lengths: Sequence[int]) -> tuple[Unpartitioned, list[Tensor]]:
    """The model by itself, slice by slice, and its losses."""
    model = Unpartitioned(Case("seq1f1b", dist.get_world_size(), m, [Slices(lengths)]))
    return model, model.losses(1, 0, False)


@on_ranks(2)
def test_shapes_of_other_slices_are_found(rank: int) -> None:
    """Where the lengths change from one step to the next. Gradients come back last slice first: of other sizes than the
    outputs, in the order in which these were sent. Lengths in a range stayed those of the step before."""
    (chunk,) = build("seq1f1b")
    stage = megapipe.PipelineStage(chunk, chunk.info)
    for lengths in ((3, 2, 1), range(1, 4)):
        stage.zero_grad()
        run("seq1f1b", [stage], 2, lengths)
        assert_same_gradients([chunk], whole(2, lengths)[0].stages)


@on_ranks(2)
def test_each_microbatch_has_one_report_and_one_item_of_data(rank: int) -> None:
    (chunk,) = build("seq1f1b")
    firsts: list[int] = []
    chunk.set_is_first_microbatch = lambda: firsts.append(rank)
    data = batches(4, 1, [6] * 4)
    reports = run("seq1f1b", chunk, 3, (3, 2, 1), data_iterator=data)
    assert len(list(data)) == 1  # each chunk has read three items
    assert firsts == [rank]
    losses = whole(3, (3, 2, 1))[1] if chunk.info.is_last else []
    for report, loss in zip(reports, losses, strict=True):
        assert torch.equal(report["loss"], loss)
        assert torch.equal(report["parts"][0], report["loss"])
        assert report["count"] == 3
        assert report["at"] == slices.SequenceSlice(2, 3, 5, 1)
    assert slices.current() is None


@on_ranks(1)
def test_tokens_divide_in_the_dtype_of_the_loss(rank: int) -> None:
    """The weight of a token was computed in float32 where tokens are whole numbers or Python's: gradients in float64
    were off by 3e-8. And a loss function that counts into the same tensor each time counted for all slices before."""
    parallel_state.initialize_model_parallel(1)
    (info,) = stages_for_rank("seq1f1b")
    x, count = torch.randn(2, 8, 4, dtype=torch.float64), torch.zeros((), dtype=torch.int64)
    for count_by in (int, torch.tensor, count.fill_, lambda k: k * 1.1):

        def step(data: Iterator[Tensor], model: nn.Module, count_by: Any = count_by) -> tuple[Tensor, Any]:
            part = slices.cut(next(data), 1)
            return model(part), lambda output: (output.square().sum(), count_by(part.shape[1] + 1), None)

        config = megapipe.PipelineConfig(num_sequence_slices=3)
        chunk = megapipe.PipelineStage(nn.Linear(4, 4).double(), info, config)
        run("seq1f1b", [chunk], 1, (3, 3, 2), forward_step_func=step, data_iterator=iter([x]))
        grad, chunk.module.weight.grad = chunk.module.weight.grad, None
        (chunk(x).square().sum() / count_by(11)).backward()
        torch.testing.assert_close(grad, chunk.module.weight.grad, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_validation_reports_microbatches_and_hands_out_slices(rank: int) -> None:
    """Where loss functions return no loss, or there are none. tests/cases compares the losses."""
    (chunk,) = build("seq1f1b")

    def without_loss(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, None]:
        return model(next(data_iterator)["tokens"]), None

    def with_reports_only(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        return model(next(data_iterator)["tokens"]), lambda output: (0, None, len(output))

    outputs = run("seq1f1b", chunk, 3, (4, 2), forward_only=True, forward_step_func=without_loss)
    lengths = run("seq1f1b", chunk, 3, (4, 2), forward_only=True, forward_step_func=with_reports_only)
    assert lengths == ([6, 6, 6] if chunk.info.is_last else [])
    assert [[part.shape[0] for part in output] for output in outputs] == [[4, 2]] * len(lengths)


@on_ranks(2)
def test_a_recorded_step_has_slices(rank: int, tmp_path: Path) -> None:
    recorder = megapipe.TimelineRecorder()
    chunks = build("seq1f1b", record_timeline=recorder)
    for _ in range(2):
        run("seq1f1b", chunks, 2, (4, 2))
    timeline = recorder.gather()
    if rank == 0:
        timeline.save(tmp_path / "timeline.json")
        assert load_timeline(tmp_path / "timeline.json").steps[0][0].spans[1].action == Action(0, "F", 0, 1)
    timeline.plan.check()
    assert timeline.plan.actions == megapipe.plan.make_plan("seq1f1b", 2, 2, num_slices=2).actions
    assert len(timeline.costs().slices) == 2
    assert timeline.predict().makespan > 0


@on_ranks(2)
def test_gradients_are_exchanged_after_the_last_slice(rank: int) -> None:
    log: list[str] = []

    @contextmanager
    def no_sync() -> Iterator[None]:
        log.append("held")
        yield
        log.append("released")

    def step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_func = forward_step(data_iterator, model)
        if output.requires_grad:
            output.register_hook(lambda grad: log.append("backward"))
        return output, loss_func

    for schedule, last in (("seq1f1b", ["released", "backward"]), ("seq_zb1p", ["backward", "released"])):
        log.clear()
        run(schedule, build(schedule, no_sync_func=no_sync), 2, (3, 2), forward_step_func=step)
        assert log == ["held", *["backward"] * 3, *last, "held", "released"]
    log.clear()
    synced = build("seq1f1b", no_sync_func=no_sync, grad_sync_func=lambda parameters: log.append("synced"))
    run("seq1f1b", synced, 2, (3, 2), forward_step_func=step)
    assert log == ["held", *["backward"] * 4, "released", "synced", "held", "released"]


REFUSED = [
    ({}, {"schedule": "1f1b"}, "1f1b cannot cut sequences, got 2 slices: choose seq1f1b, "),
    ({"sequence_slice_lengths": [1, 2, 3]}, {}, "has 3 lengths, but num_sequence_slices is 2"),
    ({"sequence_slice_lengths": [1, 2]}, {}, r"a sequence of 6 cannot be cut into 2 slices of \[1, 2\]"),
    ({"sequence_slice_lengths": [6, 0]}, {}, "a sequence of whole numbers from 1 on"),
    ({"num_sequence_slices": 7}, {}, r"a sequence of 6 cannot be cut into 7 slices of \[1, 1, 1, 1, 1, 1, 0\]"),
    ({"num_sequence_slices": 0}, {}, "num_sequence_slices must be a whole number from 1 on"),
    ({}, {"seq_length": None}, "num_sequence_slices=2 takes seq_length"),
    (
        {"sequence_parallel": True, "tensor_model_parallel_size": 2, "sequence_slice_lengths": [3, 3]},
        {},
        "each a multiple of the 2 tensor-parallel ranks",
    ),
]
"""Beside what does not go together (tests/cases/test_combinations.py)."""


@pytest.mark.parametrize(("config", "arguments", "text"), REFUSED)
def test_what_does_not_go_with_slices_is_refused(config: Any, arguments: Any, text: str) -> None:
    model = stage_of(StageInfo(0, 1), **{"num_sequence_slices": 2, **config})
    arguments = {"schedule": "seq1f1b", "seq_length": 6, "micro_batch_size": BATCH, **arguments}
    function = megapipe.get_forward_backward_func(arguments.pop("schedule"))
    data = {"data_iterator": batches(2, 1, [6] * 2), "num_microbatches": 2}
    with pytest.raises(ValueError, match=text):
        function(forward_step_func=forward_step, model=model, **data, **arguments)


def test_a_model_that_does_not_ask_for_its_slice_is_refused() -> None:
    """On one rank each slice computed the whole sequence, and trained on it once per slice, in silence."""
    model = nn.Linear(3, 1)
    stage = megapipe.PipelineStage(model, StageInfo(0, 1), megapipe.PipelineConfig(num_sequence_slices=2))

    def step(data_iterator: Iterator[Tensor], stage: nn.Module) -> tuple[Tensor, Any]:
        return stage(next(data_iterator)), lambda output: (output.mean(), {})

    with pytest.raises(ValueError, match=r"run slice 0 of 2 without asking which it is.* megapipe.slices.cut"):
        run("seq1f1b", stage, 1, (3, 3), forward_step_func=step, data_iterator=iter(torch.ones(1, 6, 3)))


def test_what_does_not_go_with_slices_is_refused_in_later_steps_too() -> None:
    """Only the first step was looked at. Each slice read another microbatch, where a data_iterator was asked by a
    method of its own, and a graph that was made of one sequence left out what earlier slices kept."""
    model = stage_of(StageInfo(0, 1), num_sequence_slices=2)
    run("seq1f1b", model, 2, (3, 3))
    later: dict[str, dict[str, Any]] = {
        "a data_iterator without __next__": {"data_iterator": SimpleNamespace(get=lambda: None)},
        "pipeline_inputs": {"pipeline_inputs": {}},
        "a captured stage": {},
    }
    for what, arguments in later.items():
        if not arguments:
            capture(model.head, (torch.zeros(3, BATCH, HIDDEN, requires_grad=True),))
        with pytest.raises(ValueError, match=f"does not go with {what}"):
            run("seq1f1b", model, 2, (3, 3), **arguments)


def test_slices_are_as_equal_as_can_be() -> None:
    lengths = []

    def step(data_iterator: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        this = slices.current()
        lengths.append(None if this is None else this.length)
        return forward_step(data_iterator, model)

    for options, expected in (
        ({"num_sequence_slices": 4}, [3, 3, 2, 2]),
        ({"num_sequence_slices": 3, "sequence_parallel": True, "tensor_model_parallel_size": 2}, [4, 4, 2]),
        ({"num_sequence_slices": 1}, [None]),
    ):
        lengths.clear()
        model = stage_of(StageInfo(0, 1), **options)
        megapipe.get_forward_backward_func("seq1f1b")(
            forward_step_func=step, data_iterator=batches(1, 1, [10]), model=model, num_microbatches=1, seq_length=10
        )
        assert lengths == expected
