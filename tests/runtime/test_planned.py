"""Plans that run: those of schedules, of files, of torch and of anybody's search."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.models import assert_same_gradients, assert_same_losses, build, reference, run
from tools.ranks import on_ranks
from tools.torchs import OF_ONE_CHUNK, torch_order, torchs_schedule

from megapipe import PipelineError, get_forward_backward_func, stages_for_rank
from megapipe.plan import ScheduleError, load_plan, make_plan


def write(folder: Path, rank: int, text: str, name: str = "mine.txt") -> Path:
    """A file that only this rank writes."""
    path = folder / str(rank) / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def assert_trains(schedule: Any, pp_size: int, num_microbatches: int, **options: Any) -> None:
    """One step: losses and gradients of the unpartitioned model, bit for bit."""
    num_layers = 2 * pp_size
    chunks = build(schedule, pp_size, num_layers, **options)
    reports = run(schedule, chunks, num_microbatches)
    model, losses = reference(num_layers, num_microbatches)
    assert_same_losses(reports, losses, chunks)
    assert_same_gradients(chunks, model)


@on_ranks(2)
def test_orders_as_text(rank: int, tmp_path: Path) -> None:
    """By hand: GPipe whose Ws of the first rank come first to last, those of the second last."""
    schedule = str(write(tmp_path, rank, "0F0 0F1 0B0 0W0 0B1 0W1\n1F0 1F1 1B0 1B1 1W0 1W1\n"))
    assert_trains(schedule, 2, 2, deferred=True)
    chunks = build(schedule, 2, 4, deferred=True)
    reports = run(schedule, chunks, 2, forward_only=True)
    assert_same_losses(reports, reference(4, 2)[1], chunks)
    assert get_forward_backward_func(schedule) is get_forward_backward_func(schedule)
    # The error of this rank, or of the other one.
    with pytest.raises((ValueError, PipelineError), match=r"is a plan of 2 microbatches in 1 slice\(s\), got 3 in 1"):
        run(schedule, chunks, 3)


@on_ranks(3)
def test_a_placement_that_is_not_its_own_inverse(rank: int, tmp_path: Path) -> None:
    schedule = write(tmp_path, rank, "0F0,4F0,4B0,0B0\n1F0,5F0,5B0,1B0\n2F0,3F0,3B0,2B0\n")
    chunks = build(schedule, 3, 6)
    assert [info.index for info in stages_for_rank(schedule)] == [rank, 3 + (rank + 1) % 3]
    run(schedule, chunks, 1)
    assert_same_gradients(chunks, reference(6, 1)[0])


@on_ranks(2)
def test_ranks_with_different_plans(rank: int, tmp_path: Path) -> None:
    path = write(tmp_path, rank, "", "plan.csv")
    make_plan("1f1b" if rank else "gpipe", 2, 4).save_csv(path)
    chunks = build(path, 2, 4)
    with pytest.raises((ValueError, PipelineError), match=r"schedule.*plan \["):
        run(path, chunks, 4)


def test_a_plan_that_cannot_run_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "plan.txt").write_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    with pytest.raises(ScheduleError, match="would hang: rank 0 waits at 0B0"):
        get_forward_backward_func(path)


def test_the_files_of_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path was that of the folder where it was first looked up, and a line of 131,073 letters was none."""
    for num_microbatches in (140, 141):
        folder = tmp_path / str(num_microbatches)
        folder.mkdir()
        monkeypatch.chdir(folder)
        cells = [f"0{kind}{number}" for kind in "FB" for number in range(num_microbatches)]
        Path("plan.txt").write_text((" " * 500).join(cells))
        os.utime("plan.txt", (0, 0))
        assert get_forward_backward_func("plan.txt").sizes == (1, num_microbatches, 1)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no file .*nowhere\.csv: give that of a plan"):
        get_forward_backward_func(tmp_path / "nowhere.csv")


# torch.distributed.pipelining


def save_torchs(name: str, pp_size: int, num_microbatches: int, path: Path) -> None:
    schedule = torchs_schedule(name, pp_size, num_microbatches)
    if name in OF_ONE_CHUNK:  # it writes no file for these
        path.write_text("\n".join(map(",".join, torch_order(schedule))))
    else:
        schedule._dump_csv(str(path))


@on_ranks(2)
def test_plans_that_torch_wrote(rank: int, tmp_path: Path) -> None:
    for name in (OF_ONE_CHUNK[-1], "ScheduleInterleavedZeroBubble", "ScheduleDualPipeV"):
        path = write(tmp_path, rank, "", f"{name}.csv")
        save_torchs(name, 2, 4, path)
        pairs = [cell for row in load_plan(path).cells() for cell in row if "OVERLAP" in cell]
        has_pairs = name == "ScheduleDualPipeV" and torch.__version__ >= "2.13"  # 2.9 writes down the parts of a pair
        assert bool(pairs) == has_pairs
        assert_trains(path, 2, 4, deferred=True)
