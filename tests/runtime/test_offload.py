"""Activations that go to host memory (O) and come back (L) where the plan says; gradients stay what they are."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.against import mean_square, normal, step, unlabelled
from tools.models import BATCH, HIDDEN
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from megapipe import PipelineStage, stages_for_rank
from megapipe.activations import Offload, storages_of
from megapipe.plan import (
    Action,
    Costs,
    Plan,
    ScheduleError,
    Settings,
    Span,
    find_schedule,
    held_changes,
    load_plan,
    make_plan,
    offload_activations,
    plan_of,
)

CHUNKS = {"looped_bfs": 2, "interleaved_1f1b": 2, "combined_zb1p": 2}
SCHEDULES = ["looped_bfs", "1f1b", "zb2p", "combined_zb1p", "zbv"]
"""Of each kind one: all Bs at the end or not, Ws apart, overlapped pairs, a V."""
ONE_PENDING = Settings(max_pending_weights=1)


def offloaded(schedule: str, pp_size: int, m: int, copying: float = 1.0, settings: Settings = ONE_PENDING) -> Plan:
    plan = make_plan(schedule, pp_size, m, CHUNKS.get(schedule), settings=settings)
    return offload_activations(plan, Costs(), copying)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_are_no_longer_and_hold_less(schedule: str, tmp_path: Path) -> None:
    for pp_size, m in ((1, 1), (2, 5), (4, 9)):
        before = make_plan(schedule, pp_size, m, CHUNKS.get(schedule), settings=ONE_PENDING).simulate()
        for copying in (0.3, 1.0, 2.5):
            plan = offloaded(schedule, pp_size, m, copying)
            plan.check()
            after = plan.simulate()
            assert after.makespan == before.makespan
            assert all(less <= more for less, more in zip(after.peak_activations, before.peak_activations))
            for row in plan.actions:
                assert all(peak(without) > peak(row) for without in without_one(row)), "a copy is for nothing"
            for spans, forwards in zip(after.spans, plan.offloaded):
                assert_in_time(list(spans), forwards, copying / plan.num_chunks)
    plan.save_json(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").actions == plan.actions


def peak(actions: list[Action]) -> float:
    return max(itertools.accumulate(held_changes(actions)))


def without_one(actions: list[Action]) -> Iterator[list[Action]]:
    """Each time another unit stays where it is. All went whose copies were in time: on one rank those of zbv, where it
    takes a third longer on a GPU, and holds no less."""
    for out in (action for action in actions if action.kind == "O"):
        yield [one for one in actions if one not in (out, out._replace(kind="L"))]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_action_waits_for_a_copy(schedule: str) -> None:
    """An O that waited for its copy held up an L behind it, whose B then came too late."""
    for (pp_size, m), copying in itertools.product(((2, 8), (4, 5)), (0.3, 1.0, 2.5)):
        num_stages = pp_size * find_schedule(schedule).check(pp_size, CHUNKS.get(schedule))
        settings = Settings(None, None, 0, 1, tuple(stage % 2 > 0 for stage in range(num_stages)))
        plan = offloaded(schedule, pp_size, m, copying, settings)
        for spans, forwards in zip(plan.simulate().spans, plan.offloaded):
            assert_in_time(list(spans), forwards, copying * pp_size / num_stages)


def assert_in_time(spans: list[Span], forwards: frozenset[Action], size: float) -> None:
    left: dict[tuple[int, int], float] = {}
    back: dict[tuple[int, int], float] = {}
    now = out_until = back_until = 0.0
    for action, start, end in spans:
        unit = action.stage, action.microbatch
        if action.kind == "O":
            now = max(now, left[unit])
        elif action.kind == "L":
            back[unit] = back_until = max(back_until, now) + size
        else:
            assert now <= start + 1e-6, f"{action} waits for an O"
            assert action.kind not in ("B", "BW") or back.get(unit, 0.0) <= start + 1e-6, f"{action} waits for its L"
            now = end
        if action in forwards:
            left[unit] = out_until = max(out_until, end) + size


@pytest.mark.parametrize(
    ("schedule", "peaks"), [("1f1b", [8, 2, 5]), ("interleaved_1f1b", [11.5, 1.5, 6.5]), ("zbv", [8, 1.5, 5.5])]
)
def test_peaks(schedule: str, peaks: list[float]) -> None:
    """Without, and where a copy takes as long as the F, or twice as long."""
    costs = Costs(1.0, 1.0, 0.9)
    plan = make_plan(schedule, 8, 32, CHUNKS.get(schedule), settings=ONE_PENDING)
    plans = [plan, offload_activations(plan, costs, 1.0), offload_activations(plan, costs, 2.0)]
    assert [max(one.simulate().peak_activations) for one in plans] == peaks


@pytest.mark.parametrize("costs", [Costs(forward=[1, 0, 1, 1]), Costs(backward_input=[0, 0, 1, 1], backward_weight=0)])
def test_actions_that_take_no_time(costs: Costs) -> None:
    """Stages without layers, and frozen ones: O came before its F, and Ls in an order that backwards do not take."""
    for copying in (0.1, 0.5, 1):
        offload_activations(make_plan("looped_bfs", 2, 4), costs, copying).check()


def test_what_cannot_be_offloaded() -> None:
    plan = make_plan("1f1b", 2, 4)
    with pytest.raises(ValueError, match="more than 0, got 0"):
        offload_activations(plan, Costs(), 0)
    with pytest.raises(ValueError, match="activations of seq1f1b are not moved to host memory, since it runs"):
        offload_activations(make_plan("seq1f1b", 2, 4, num_slices=2), Costs(), 1)
    with pytest.raises(ValueError, match=r"gpipe \[\w+\] is a plan that moves activations"):
        make_plan(offloaded("gpipe", 2, 4), 2, 4, settings=Settings(offload=1.0))
    actions = [list(row) for row in offloaded("gpipe", 2, 4).actions]
    without = [[action for action in row if action.kind != "L"] for row in actions]
    with pytest.raises(ScheduleError, match=r"calls backward_step\(0\) for activations that are in host"):
        plan_of("without", without).check()
    twice = [[*row, row[-1]._replace(kind="L")] for row in without]
    with pytest.raises(ScheduleError, match=r"rank 0 calls"):
        plan_of("twice", twice).check()


@on_ranks(2)
def test_activations_of_tensor_parallel_layers(rank: int) -> None:
    """Of a DTensor the local part is moved: it has no memory of its own."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    x = torch.randn(BATCH, HIDDEN)
    gradients = []
    for is_moved in (False, True):
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, HIDDEN))
        plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
        parallelize_module(module, mesh, plan)
        offload = Offload(x.device, storages_of(module.parameters()), "the layers")
        with offload.saving() if is_moved else nullcontext():
            output = module(x)
        if is_moved:
            offload.begin()
            offload.free()
            offload.load()
        output.sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in module.parameters()])
    for kept, moved in zip(*gradients):
        assert torch.equal(kept, moved)


ALL_MOVED = plan_of(
    "all moved", [[Action(0, kind, unit) for kinds in ("F", "O", ["L", "BW"]) for unit in range(6) for kind in kinds]]
)


def train_moved(function: Any, schedule: Any) -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Function(function))
    (info,) = stages_for_rank(schedule, 0, 1)
    step(schedule, PipelineStage(module, info), unlabelled(normal(6, BATCH, HIDDEN)), mean_square)
    return [parameter.grad for parameter in module.parameters()]


class Function(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("sparse", torch.eye(BATCH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def test_sparse_tensors() -> None:
    """They have no memory of their own. tests/cases has conjugates, which share theirs."""
    function = lambda x: torch.sparse.mm(torch.eye(BATCH).to_sparse(), x)  # noqa: E731
    kept, moved = (train_moved(function, schedule) for schedule in ("gpipe", ALL_MOVED))
    assert all(map(torch.equal, kept, moved))


def test_what_comes_back_is_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that was changed in place, and a copy that is wrong, were used without a word."""
    with pytest.raises(
        RuntimeError, match=r"stage 0 \(PipelineStage\): .* modified by an inplace operation: a tensor of"
    ):
        train_moved(lambda x: x.exp().add_(1), ALL_MOVED)
    copy_out = Offload._copy_out

    def copy_wrong(offload: Any) -> None:
        copy_out(offload)
        for memory in offload._memories.values():
            memory.host[-1] += 1

    monkeypatch.setattr(Offload, "_copy_out", copy_wrong)
    with pytest.raises(RuntimeError, match=r"stage 0 .*: a saved tensor \(.*\) came back from host memory as another"):
        train_moved(torch.sigmoid, ALL_MOVED)
