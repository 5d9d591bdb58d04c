"""Schedules that cut sequences into slices: their bubble, their memory, and what a plan of slices must keep to."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megapipe.plan import (
    Action,
    Costs,
    Plan,
    ScheduleError,
    Settings,
    load_plan,
    make_plan,
    place_weights,
    plan_of,
    simulate,
)
from megapipe.plan.simulation import peak_activations

SLICED = {"seq1f1b": "1f1b", "seq_interleaved_1f1b": "interleaved_1f1b", "seq_zb1p": "zb1p"}
"""With the schedule that each is with one slice."""

PAGE = Path(__file__).parents[2] / "docs" / "long_context.md"
TABLE = re.findall(r"^\| (\d+), (\d+) \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
"""The rows of the page: ranks and microbatches, and by slices the bubble of seq1f1b and the microbatches held."""


def test_bubble_and_memory_fall_with_the_number_of_slices() -> None:
    """F : B is 1 : 2. The bubble is exactly that of n times as many microbatches."""
    assert len(TABLE) == 4
    for pp_size, m, cells in [(int(row[0]), int(row[1]), row[2].split(" | ")) for row in TABLE]:
        for num_slices, cell in zip((1, 2, 4, 8), cells, strict=True):
            simulation = make_plan("seq1f1b", pp_size, m, num_slices=num_slices).simulate()
            exact = (pp_size - 1) / (m * num_slices + pp_size - 1)
            assert simulation.bubble == pytest.approx([exact] * pp_size)
            held = f"{max(simulation.peak_activations) + 1e-9:.2f}".rstrip("0").rstrip(".")  # 1.375 is 1.38
            assert cell == f"{100 * exact:.1f}%, {held}"
            assert simulation.lower_bound <= simulation.makespan


def plans(microbatches: Any, slices: Any, ranks: Any = range(1, 9), chunks: Any = (2,)) -> Iterator[Plan]:
    for name in SLICED:
        for num_chunks in chunks if name == "seq_interleaved_1f1b" else (1,):
            for pp_size in ranks:
                for m in microbatches:
                    for num_slices in slices:
                        yield make_plan(name, pp_size, m, num_chunks, num_slices=num_slices)


def assert_runs(plan: Plan) -> None:
    plan.check()
    p, m, n = plan.pp_size, plan.num_microbatches, plan.num_slices
    if plan.num_chunks == 1 and plan.name != "seq_interleaved_1f1b":
        assert max(peak_activations(plan)) == min(m, (p + n - 1) / n)


def test_no_plan_hangs_and_memory_is_that_of_the_formula() -> None:
    for plan in plans((1, 2, 5), (1, 2, 7), (1, 2, 3), (1, 3)):
        assert_runs(plan)


@pytest.mark.soak
@pytest.mark.parametrize("num_slices", range(1, 17))
def test_no_plan_of_any_size_hangs(num_slices: int) -> None:
    for plan in plans(range(1, 33), [num_slices]):
        assert_runs(plan)


@pytest.mark.parametrize(("sliced", "plain"), SLICED.items())
def test_with_one_slice_a_plan_is_that_of_whole_sequences(sliced: str, plain: str) -> None:
    for pp_size, m in ((1, 3), (3, 2), (4, 9)):
        for limit in (None, pp_size + 1.0, 2.0 * pp_size):
            settings = Settings(max_in_flight=limit)
            try:
                expected = make_plan(plain, pp_size, m, settings=settings)
            except ValueError:
                with pytest.raises(ValueError, match="max_in_flight"):
                    make_plan(sliced, pp_size, m, settings=settings)
            else:
                assert make_plan(sliced, pp_size, m, settings=settings).events == expected.events


def test_room_in_memory_is_used() -> None:
    for name in ("seq1f1b", "seq_interleaved_1f1b", "seq_zb1p"):
        for limit in (2.0, 2.5, 3.0):
            plan = make_plan(name, 4, 8, num_slices=4, settings=Settings(max_in_flight=limit))
            plan.check()
            assert max(plan.simulate().peak_activations) <= limit
    slow = {"p2p": 0.1}
    more = make_plan("seq1f1b", 4, 8, num_slices=4, settings=Settings(max_in_flight=2.5))
    assert more.simulate(**slow).makespan < make_plan("seq1f1b", 4, 8, num_slices=4).simulate(**slow).makespan


def test_weights_are_placed_among_slices() -> None:
    plan = make_plan("seq_zb1p", 4, 4, num_slices=2)
    costs = Costs(1.0, 1.4, 0.6, slices=(1.0, 1.5))
    placed = place_weights(plan, costs, max_held=3.0)
    placed.check()
    assert simulate(placed, costs).makespan < simulate(plan, costs).makespan
    assert max(simulate(placed, costs).peak_activations) <= 3.0


def test_slices_share_out_the_times_of_a_microbatch() -> None:
    plan = make_plan("seq1f1b", 1, 1, num_slices=2)
    spans = plan.simulate(4.0, 2.0, 2.0, slices=(1, 3)).spans[0]
    assert [(str(span.action), span.end - span.start) for span in spans] == [
        ("0F0", 1.0),
        ("0F0.1", 3.0),
        ("0B0.1", 3.0),
        ("0B0", 1.0),
    ]
    even, uneven = (make_plan("seq1f1b", 4, 8, num_slices=4).simulate(slices=s) for s in (None, (1, 1.5, 2, 2.5)))
    assert uneven.makespan > even.makespan
    assert uneven.lower_bound <= uneven.makespan
    with pytest.raises(ValueError, match="one relative time for each of the 2 slices, got 3"):
        plan.simulate(slices=(1, 2, 3))
    with pytest.raises(ValueError, match="of which one at least is more than 0"):
        Costs(slices=(0, 0))


def test_a_message_occupies_its_channel_for_its_share() -> None:
    whole, cut = (make_plan("seq1f1b", 2, 1, num_slices=n).simulate(0, 0, 0, message=4.0).makespan for n in (1, 4))
    assert (whole, cut) == (8.0, 8.0)  # four slices of a quarter, one after the other, both ways


def test_files_keep_slices(tmp_path: Path) -> None:
    plan = make_plan("seq_interleaved_1f1b", 3, 2, num_slices=3)
    plan.save_json(tmp_path / "plan.json")
    plan.save_csv(tmp_path / "plan.csv")
    for ending in ("json", "csv"):
        loaded = load_plan(tmp_path / f"plan.{ending}")
        assert loaded.actions == plan.actions
        assert loaded.num_slices == 3
        loaded.check()


def test_a_schedule_of_whole_sequences_refuses_slices() -> None:
    with pytest.raises(ValueError, match=r"zbv cannot cut sequences, got 4 slices: choose seq1f1b, .*, or 1 slice\."):
        make_plan("zbv", 2, 4, num_slices=4)
    with pytest.raises(ValueError, match="at least 1 slice, got num_slices=0"):
        make_plan("seq1f1b", 2, 4, num_slices=0)
    with pytest.raises(TypeError, match=r"num_slices is a whole number, got 1\.5"):
        make_plan("seq1f1b", 2, 4, num_slices=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least the 4 ranks of the pipeline, divided by 2 slices, got 1"):
        make_plan("seq_interleaved_1f1b", 4, 8, num_slices=2, settings=Settings(1))


def actions(text: str) -> list[Action]:
    kinds = {"B": "BW"}
    return [Action(0, kinds.get(cell[1], cell[1]), int(cell[2]), int(cell[4:] or 0)) for cell in text.split()]


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ("0F0.1 0F0 0B0.1 0B0", "has 0RECV_F0.1 on rank 0 where 0RECV_F0 is next"),
        ("0F0 0F0.1 0B0 0B0.1", "has 0RECV_B0 on rank 0 where 0RECV_B0.1 is next"),
        ("0F0 0B0 0F0.1 0B0.1", r"calls recv_backward\(0\) for slice 1 of microbatch 0 before send_forward\(0\)"),
        ("0F0 0F0.1 0B0.1", "ended its step after 1 calls"),
        ("0F0 0F0.1 0F0.1 0B0.1 0B0", r"more often than there are slices of microbatches \(2\)"),
    ],
)
def test_keys_and_their_gradients_are_there_before_they_are_used(row: str, text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        plan_of("mine", [actions(row)]).check()
