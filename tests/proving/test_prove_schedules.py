"""`megapipe prove`: schedules of the package, of files, and wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tools.torchs import against_torch

from megapipe import schedule
from megapipe.analysis.cli import main
from megapipe.plan import Verbs, loop, make_plan, registry
from megapipe.proving import ScheduleProof, check_sizes, prove_schedule, schedule_proof, sizes
from megapipe.schedules import BW, B, F, W


@pytest.fixture
def made() -> Any:
    """Decorates schedules that are gone after the test."""
    before = dict(registry._schedules)
    yield schedule
    registry._schedules.clear()
    registry._schedules.update(before)


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half as many ranks as usual on paper, and one number of them that run."""
    monkeypatch.setattr(sizes, "LARGEST", 4)
    monkeypatch.setattr(schedule_proof, "RANKS", (2,))


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    status = main(["prove", *arguments])
    return status, " ".join(capsys.readouterr().out.split())


@against_torch
def test_a_schedule_that_is_right(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out = out_of(capsys, "zbv", "--save", str(tmp_path / "zbv.md"), str(tmp_path / "zbv.json"))
    assert status == 0
    assert "zbv: right on paper 40 sizes cannot hang: p up to 4, m up to 16" in out
    assert "what one process does, to the last bit: 3 and 4 microbatches on 2 ranks" in out
    assert "in torch the same, to the last bit, by torch's _PipelineScheduleRuntime" in out
    assert "zbv (this) 12.5 4.0% 2 16" in out
    assert "![The schedule zbv](zbv.svg)" in (tmp_path / "zbv.md").read_text()
    assert (tmp_path / "zbv.svg").read_text().startswith("<?xml")
    saved = json.loads((tmp_path / "zbv.json").read_text())
    assert saved["is_right"]
    assert saved["sizes"] == {"right": 40, "refused": 0, "wrong": 0}
    assert [one["same"]["gradient"] for one in saved["torchs"]] == [[66, 66]]
    assert saved["held"] == pytest.approx([2.0] * 2, abs=1.1)  # of the plan; receives are posted ahead


@against_torch
def test_a_plan_of_torchs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    make_plan("interleaved_zb1p", 2, 4).save_csv(path := tmp_path / "theirs.csv")
    status, out = out_of(capsys, str(path))
    assert status == 0
    assert "1 sizes cannot hang: p up to 2, m up to 4" in out
    assert "the same, to the last bit, by torch's" in out


def test_a_plan_whose_receives_are_swapped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (path := tmp_path / "plan.csv").write_text("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0\n")
    status, out = out_of(capsys, str(path))
    assert status == 1
    assert "the microbatches [0, 1], but [1, 0] are received" in out


def test_a_hang_is_drawn(capsys: pytest.CaptureFixture[str], made: Any, tmp_path: Path) -> None:
    @made("hangs", placement=loop)
    def hangs(pipe: Verbs) -> Any:
        for _ in range(min(pipe.num_microbatches, 1 + 2 * (pipe.pp_rank % 2))):
            F(pipe)
        for _ in range(pipe.num_microbatches):
            F(pipe)
            BW(pipe)
        return pipe.finish()

    status, out = out_of(capsys, "hangs", "--save", str(tmp_path / "hang.svg"))
    assert status == 1
    assert "rank 0 waits at 0B0 for the output gradient of microbatch 0 from rank 1, which waits at 1F" in out
    assert "0B0?" in out
    assert "B0?" in (tmp_path / "hang.svg").read_text()


def refuses(pipe: Verbs) -> Any:
    if pipe.num_microbatches < pipe.pp_size:
        raise ValueError(f"it takes {pipe.pp_size} microbatches at least")
    return few(pipe)


def few(pipe: Verbs) -> Any:
    """Runs as many forwards ahead as there are ranks behind, whether there are so many or not."""
    for _ in range(pipe.pp_size - pipe.pp_rank - 1):
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()
    for _ in range(pipe.num_microbatches):
        F(pipe)
        BW(pipe)
    return pipe.finish()


def no_weights(pipe: Verbs) -> Any:
    for _ in range(pipe.num_microbatches):
        F(pipe)
        B(pipe)
    return pipe.finish()


def never_ends(pipe: Verbs) -> Any:
    while pipe.num_pending_weights() < 10**6:
        W(pipe)


def test_a_function_that_does_not_return(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megapipe.proving.sizes.PATIENCE", 0.5)
    made("wrong", placement=loop)(never_ends)
    assert "TimeoutError: the schedule's function has not returned after 0.5 s" in str(check_sizes("wrong"))


def test_what_sizes_have_in_common(made: Any) -> None:
    for loops, text in (
        (few, "3 of 40 sizes are wrong: it needs m >= p - 1; the first is p = 3, m = 1: rank 0 calls recv_forward(0)"),
        (
            no_weights,
            "sizes are wrong: no size is right; the first is p = 1, m = 1: rank 0 ended its step without the W",
        ),
        (lambda pipe: F(pipe, 1), "IndexError: list index out of range (test_prove_schedules.py:"),
    ):
        made("wrong", placement=loop)(loops)
        assert text in str(check_sizes("wrong"))
    made("wrong", placement=loop)(refuses)
    assert str(check_sizes("wrong")) == (
        "34 sizes cannot hang: p up to 4, m up to 16; 6 are refused, such as p = 2, m = 1 (it takes 2 microbatches at "
        "least)"
    )


def test_twice_the_memory(capsys: pytest.CaptureFixture[str], made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @made("twice", placement=loop)
    def twice(pipe: Verbs) -> Any:
        ahead = min(pipe.num_microbatches, 2 * (pipe.pp_size - pipe.pp_rank))
        for _ in range(ahead):
            F(pipe)
        for _ in range(pipe.num_microbatches):
            BW(pipe)
            F(pipe)
        return pipe.finish()

    monkeypatch.setattr(schedule_proof, "RANKS", ())  # on paper alone
    status, out = out_of(capsys, "twice")
    assert status == 0
    assert "beaten twice the memory: twice holds 8 microbatches at once, and 1f1b 4 in the same step" in out


def test_schedules_that_only_infer_or_cut_sequences() -> None:
    proof = prove_schedule("inference")
    assert proof
    assert proof.runs == []
    assert ScheduleProof("x", proof.sizes).not_by_torch == ""
    proof = prove_schedule("seq1f1b")
    assert proof, proof.mistakes
    assert ["slices" in one.subject for one in proof.runs] == [True, False, False]
