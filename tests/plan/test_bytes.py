"""Bytes of a rank over a plan: counted by hand for small ones, and where they come from."""

import dataclasses
from pathlib import Path

import pytest

from megapipe.plan import Settings, StageBytes, load_stage_bytes, make_plan, schedule_names

NEEDS = {"forward": 3.0, "backward_input": 8.0, "backward_weight": 5.0}


def test_what_units_hold() -> None:
    """1F1B on two ranks holds two microbatches on the first and one on the last; a whole backward needs the larger
    part."""
    plan = make_plan("1f1b", 2, 3)
    first, last = plan.simulate(memory=StageBytes(saved=100.0, model=1000.0, **NEEDS)).memory or ()
    assert [str(action) for action in plan.actions[0]] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"]
    assert first.during.tolist() == [103, 203, 208, 203, 208, 108]
    assert first.after.tolist() == [100, 200, 100, 200, 100, 0]
    assert first.peak == 1208
    assert first.parts == {"model": 1000, "activations": 208, "messages": 0}
    assert last.peak == 1108


def test_what_b_leaves_is_held_until_w() -> None:
    plan = make_plan("zb1p", 1, 2)
    (rank,) = plan.simulate(memory=StageBytes(saved=100.0, kept=30.0, **NEEDS)).memory or ()
    assert [str(action) for action in plan.actions[0]] == ["0F0", "0B0", "0W0", "0F1", "0B1", "0W1"]
    assert rank.during.tolist() == [103, 108, 35] * 2
    assert rank.after.tolist() == [100, 30, 0] * 2


def test_what_is_computed_again_is_held_from_then_on() -> None:
    """Until its R a unit holds the rest. The last rank has none, since each of its Bs follows its F."""
    plan = make_plan("1f1b", 2, 3, settings=Settings(recompute=True))
    held = StageBytes(saved=100.0, recomputed=80.0, recompute=4.0, **NEEDS)
    first, last = plan.simulate(memory=held).memory or ()
    assert " ".join(map(str, plan.actions[0])) == "0F0 0F1 0R0 0B0 0F2 0R1 0B1 0R2 0B2"
    assert first.during.tolist() == [23, 43, 124, 128, 43, 124, 128, 104, 108]
    assert first.after.tolist() == [20, 40, 120, 20, 40, 120, 20, 100, 0]
    assert last.peak == 108
    held = dataclasses.replace(held, replayed=110.0, replayed_forward=1.0)
    first, last = plan.simulate(memory=held).memory or ()
    assert first.during.tolist() == [31, 61, 144, 148, 61, 144, 148, 114, 118]
    assert last.peak == 108
    whole = StageBytes(saved=100.0, message=10.0)
    assert whole.per_stage("recomputed", plan) == [100, 90]  # all but the input


def test_chunks_and_slices_share_what_a_rank_holds() -> None:
    held = StageBytes(saved=80.0)
    for name, num_chunks, num_slices in (
        ("1f1b", None, 1),
        ("interleaved_1f1b", 4, 1),
        ("zbv", None, 1),
        ("seq1f1b", None, 4),
    ):
        plan = make_plan(name, 4, 8, num_chunks, num_slices=num_slices)
        simulation = plan.simulate(memory=held)
        assert simulation.peak_bytes == pytest.approx([80 * peak for peak in simulation.peak_activations])


def test_a_boundary_within_a_rank_is_held_once() -> None:
    """The output of stage 1 is the input of stage 2, on the same rank of a V: until the F of stage 2 it is held by
    itself, then in what that saves. The gradient goes back the same way. It was counted twice, or not at all."""
    plan = make_plan("v_half", 2, 1)
    stages = StageBytes(saved=[0.0, 0.0, 10.0, 0.0], message=10.0)
    _, turn = plan.simulate(memory=stages).memory or ()
    assert [str(action) for action in plan.actions[1]] == ["1F0", "2F0", "2B0", "2W0", "1B0", "1W0"]
    # What stage 2 sends on, and stage 1 back, is on its way beside the next action.
    assert turn.messages.tolist() == [0, 0, 10, 0, 0, 10]
    assert turn.during.tolist() == [0, 10, 20, 20, 0, 10]
    assert turn.after.tolist() == [10, 20, 20, 10, 10, 0]


def test_messages_by_rule() -> None:
    """Two receives are posted ahead, no more than are to come; sent messages are kept up to a size, and one at least.
    Behind that they are gone: they were counted to the end of the step."""
    plan = make_plan("1f1b", 2, 4)
    _, last = plan.simulate(memory=StageBytes(saved=0.0, message=1.0, posted=2)).memory or ()
    assert [str(action) for action in plan.actions[1]] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "1F3", "1B3"]
    # posted beside what the action takes, and the gradient sent before
    assert last.messages.tolist() == [1, 2, 2, 2, 2, 1, 1, 0]
    kept = plan.simulate(memory=StageBytes(saved=0.0, message=1.0, outbox=3.0)).memory or ()
    assert kept[1].messages.tolist() == [0, 0, 1, 1, 2, 2, 3, 0]
    idle = plan.simulate(memory=StageBytes(saved=0.0, message=1.0, posted=2, posted_bytes=4.0)).memory or ()
    assert idle[1].messages[0] == 3


def test_weights_and_gradients_that_replicas_share_out() -> None:
    """With one chunk at a time each change of chunks is a gather. Gradients are whole from a chunk's first backward to
    its last."""
    plan = make_plan("interleaved_1f1b", 2, 2)
    stages = StageBytes(saved=0.0, gathered=20.0, gradients=[1.0, 1.0, 2.0, 2.0])
    for most, gathered, gathers in ((None, [20] * 6 + [10] * 2, 2), (1, [10] * 8, 3)):
        first, _ = plan.simulate(memory=dataclasses.replace(stages, max_gathered=most)).memory or ()
        assert " ".join(map(str, plan.actions[0])) == "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1"
        assert first.gathers == gathers
        assert first.during.tolist() == [a + b for a, b in zip(gathered, [0, 0, 0, 0, 0, 2, 0, 1])]
        assert first.parts["gathered"] == max(first.during)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "inference"])
def test_nothing_is_left_at_the_end(name: str) -> None:
    plan = make_plan(name, 1 if name == "no_pipelining" else 2, 5)
    for rank in plan.simulate(memory=StageBytes(saved=7.0, kept=5.0, message=1.0)).memory or ():
        assert rank.after[-1] <= 1  # the last gradient, on its way
        assert rank.after.min() >= 0


def test_files(tmp_path: Path) -> None:
    held = StageBytes(saved=[1.0, 2.0, 3.0, 4.0], message=5.0, model=6.0, posted=2)
    held.save(path := tmp_path / "bytes.json")
    assert load_stage_bytes(path) == held
    path.write_text('{"bytes": {"wrong": 1}}')
    with pytest.raises(ValueError, match="does not hold the bytes of stages"):
        load_stage_bytes(path)
    assert held.even(2) == StageBytes(saved=5.0, message=5.0, model=6.0, posted=2)


def test_what_is_wrong_is_said() -> None:
    with pytest.raises(ValueError, match="saved is a number of bytes from 0 on, got -1"):
        StageBytes(saved=-1.0)
    with pytest.raises(ValueError, match="saved has one number for each of the 2 stages, got 3"):
        make_plan("1f1b", 2, 2).simulate(memory=StageBytes(saved=[1.0, 2.0, 3.0]))
