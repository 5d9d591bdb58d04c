"""Another kind of action is a row and a method: it is recorded, checked, simulated, drawn, saved, measured and run."""

from pathlib import Path
from typing import Any

import pytest
from tools.models import assert_same_gradients, build, reference, run
from tools.ranks import on_ranks

from megapipe import TimelineRecorder
from megapipe.analysis import as_text
from megapipe.analysis.charts import save_picture
from megapipe.plan import KINDS, Kind, Schedule, ScheduleError, Verbs, load_plan, loop, make_plan
from megapipe.stages.stage import Stage

PURPLE = ("#d8b0f0", "#7030a0")
LOOK = Kind("X", "look_step", "look at the activations", PURPLE, ("forward",), after="F", is_optional=True)


def loops(pipe: Verbs, num_looked_at: int | None = None) -> Any:
    """GPipe that looks at every microbatch, or at the first few of a slice-wise backward, before it goes backward."""
    for _ in range(pipe.num_units):
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()
    for number in range(pipe.num_backwards_left()):
        if num_looked_at is None or number < num_looked_at:
            pipe.run("X")
        pipe.recv_backward()
        pipe.backward_step()
        pipe.send_backward()
    return pipe.finish()


MINE = Schedule("mine", loops, loop, 1, slices=True)


@pytest.fixture
def own_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "X", LOOK)


@pytest.mark.usefixtures("own_kind")
def test_on_paper(tmp_path: Path) -> None:
    plan = make_plan(MINE, 2, 2)
    assert list(map(str, plan.actions[1])) == ["1F0", "1F1", "1X0", "1B0", "1X1", "1B1"]
    plan.check()
    costs = {"forward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
    assert plan.simulate(**costs).makespan == make_plan("gpipe", 2, 2).simulate(**costs).makespan + 2 * 2.0
    assert plan.simulate().peak_activations == make_plan("gpipe", 2, 2).simulate().peak_activations
    assert "1X0" in as_text(plan).split()
    save_picture(plan, plan.simulate(**costs), tmp_path / "plan.svg")
    picture = (tmp_path / "plan.svg").read_text()
    assert PURPLE[0] in picture
    assert LOOK.label in picture
    plan.save_json(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").actions == plan.actions
    plan.save_csv(tmp_path / "plan.csv")
    assert load_plan(tmp_path / "plan.csv").actions == plan.actions


@pytest.mark.usefixtures("own_kind")
def test_slices_are_taken_in_the_order_of_their_backwards() -> None:
    plan = make_plan(MINE, 1, 2, num_slices=2)
    assert " ".join(map(str, plan.actions[0][4:])) == "0X0.1 0B0.1 0X0 0B0 0X1.1 0B1.1 0X1 0B1"


@pytest.mark.usefixtures("own_kind")
def test_it_comes_before_the_backward_of_its_unit() -> None:
    optional = Schedule("some", lambda pipe: loops(pipe, num_looked_at=1), loop, 1)
    assert list(map(str, make_plan(optional, 1, 2).actions[0])) == ["0F0", "0F1", "0X0", "0B0", "0B1"]

    def too_late(pipe: Verbs) -> Any:
        loops(pipe, num_looked_at=0)
        pipe.run("X")

    with pytest.raises(ScheduleError, match=r"calls look_step\(0\) but has no deferred look at the activations of"):
        make_plan(Schedule("late", too_late, loop, 1), 1, 2)


@on_ranks(2)
def test_at_work(rank: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "X", LOOK)
        looked: list[int] = []
        patch.setattr(Stage, "X", lambda stage, unit: looked.append(unit.microbatch), raising=False)
        chunks, recorder = build("gpipe", 2, 4), TimelineRecorder()
        chunks[0].config.record_timeline = recorder
        run(make_plan(MINE, 2, 3), chunks, 3)
        assert looked == [0, 1, 2]
        assert_same_gradients(chunks, reference(4, 3)[0])
        timeline = recorder.gather()
        assert timeline.plan.actions == make_plan(MINE, 2, 3).actions
        assert all(time > 0 for time in timeline.mean_times["X"])
