"""Steps that do not come to their end, as far as they go."""

from pathlib import Path
from typing import Any

import pytest

from megapipe import schedule
from megapipe.analysis.charts import save_standstill
from megapipe.analysis.cli import main
from megapipe.analysis.text import standstill_as_text
from megapipe.plan import (
    Plan,
    ScheduleError,
    load_plan,
    loop,
    make_plan,
    record_partly,
    registry,
    stand_still,
    whole_units,
)
from megapipe.schedules import BW, F


def picture(plan: Plan, errors: Any = ()) -> tuple[list[str], list[str]]:
    found = stand_still(plan, errors, whole_units(plan))
    return standstill_as_text(found).splitlines(), found.reasons


def written(tmp_path: Path, text: str) -> Plan:
    (path := tmp_path / "plan.csv").write_text(text)
    return load_plan(path)


def test_who_waits_for_whom(tmp_path: Path) -> None:
    """A schedule that hangs was an error alone, when one most wants to look at it. It was simulated as far as it got:
    where each rank ran something, that came out as a step shorter than the work, else as an error about an index."""
    plan = written(tmp_path, "0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    rows, reasons = picture(plan)
    assert rows == ["0F0  0B0?", ".    1F0  1F1?"]
    assert reasons[1] == ("rank 1 waits at 1F1 for the forward input of microbatch 1 from rank 0, which waits at 0B0")
    for run in (plan.check, plan.simulate):
        with pytest.raises(ScheduleError, match=f"^plan would hang: {'; '.join(reasons)}.$"):
            run()
    with pytest.raises(ScheduleError, match="plan would hang: rank 0 waits at 0B0 for the output gradient"):
        written(tmp_path, "0B0,0F0\n1F0,1B0\n").simulate()


def test_nothing_is_marked_where_all_come_to_their_end() -> None:
    rows, reasons = picture(plan := make_plan("zbv", 2, 2))
    assert not any(reasons)
    assert stand_still(plan, costs=whole_units(plan)).end == plan.simulate(2, 2, 2).makespan
    assert "?" not in "".join(rows)


def test_an_overlapped_pair_waits_for_its_second_half(tmp_path: Path) -> None:
    plan = written(tmp_path, "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n1F0,1F1,1B0,1B1\n")
    rows, reasons = picture(plan)
    assert rows[0] == "0F0  0B0?"
    assert reasons[0].startswith("rank 0 waits at 0B0 for the output gradient of microbatch 0 from rank 1, which waits")


@pytest.fixture
def wrong() -> Any:
    @schedule("wrong_on_rank_1", placement=loop)
    def made(pipe: Any) -> Any:
        for _ in range(pipe.num_microbatches):
            F(pipe)
            if pipe.pp_rank == 1:
                pipe.recv_backward(1)
            BW(pipe)
        return pipe.finish()

    yield made
    registry._schedules.pop("wrong_on_rank_1")


def test_a_rank_stops_with_an_error(wrong: Any, tmp_path: Path) -> None:
    rows, reasons = picture(*record_partly(wrong, 3, 2))
    assert [row.split() for row in rows] == [
        ["0F0", "0B0?", ".", ".", "."],
        [".", "1F0", "!", ".", "."],
        [".", ".", "2F0", "2B0", "2B0", "2F1?"],
    ]
    assert reasons[0].endswith("from rank 1, which stops with an error")
    assert reasons[1] == "rank 1 calls recv_backward(1): it has 1 chunks, counted from 0."
    save_standstill(stand_still(*record_partly(wrong, 3, 2)), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text()
    assert ">B0?</text>" in text
    assert ">!</text>" in text


def test_show_draws_it(capsys: pytest.CaptureFixture[str], wrong: Any, tmp_path: Path) -> None:
    (path := tmp_path / "plan.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    for arguments, last in (
        ([str(path)], "which waits at 0B0."),
        (["wrong_on_rank_1", "--pp", "2", "--microbatches", "2"], "counted from 0."),
    ):
        assert main(["show", *arguments, "--save", str(tmp_path / "it.svg")]) == 2
        shown = capsys.readouterr()
        assert shown.out.startswith("0F0  0B0?")
        assert shown.err.endswith(f"{last}\n")
        assert (tmp_path / "it.svg").read_text().startswith("<?xml")
