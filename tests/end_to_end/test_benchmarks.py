"""The benchmarks run. What they show is no test's business: it depends on the machine."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tools.ranks import PATIENCE, RankPool

from megapipe import parallel_state
from megapipe.plan import Action, plan_of

ROOT = Path(__file__).parents[2]

with_torchs_pipelines = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch's own pipelining, a peer in this, lacks options (2.6) or aborts (2.9)"
)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py")))
def test_their_imports_exist(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The names of megapipe that a benchmark uses, also where `make test` does not run it."""
    monkeypatch.syspath_prepend(str(ROOT))
    importlib.import_module(f"benchmarks.{name}")


def run_benchmark(name: str, *options: str) -> None:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=PATIENCE, check=True)


def rows_of(table: Path) -> list[str]:
    return [line for line in table.read_text().splitlines() if line.startswith(("| megapipe", "| torch"))]


@pytest.mark.soak
@with_torchs_pipelines
@pytest.mark.parametrize(
    ("name", "options", "separator"),
    [
        ("schedules", "--pp 2 --microbatches 4 --milliseconds 1 --rounds 1 --block 1", ","),
        ("cold", "--pp 2 --microbatches 2 --milliseconds 1 --steps 3", ";"),
    ],
)
def test_emulated_compute(name: str, options: str, separator: str, tmp_path: Path) -> None:
    runners = ["megapipe zbv", "torch ZBVZeroBubble"]
    run_benchmark(name, *options.split(), "--runners", separator.join(runners), "--folder", str(tmp_path))
    (table,) = tmp_path.glob("*.md")
    rows = [row.split("|") for row in rows_of(table)]
    assert [row[1].strip() for row in rows] == runners
    if name == "schedules":
        assert [float(row[6]) for row in rows] == [1.042] * 2  # plan / ideal, which does not depend on the machine


def mixture_of_experts(rank: int) -> list[list[str]]:
    sys.path.append(str(ROOT))
    from benchmarks import moe

    options = "--pp 2 --microbatches 4 --milliseconds 1 --exchange-milliseconds 0.3 --rounds 1 --block 1 --warmup 0"
    try:
        return moe.measure(rank, moe.parse(options.split()))
    finally:
        parallel_state.destroy_model_parallel()


@pytest.mark.soak
def test_emulated_mixture_of_experts(ranks: RankPool) -> None:
    for rows in ranks.run(4, mixture_of_experts):
        plans = {row[0]: float(row[6]) for row in rows}  # which do not depend on the machine
        assert len(plans) == 13
        assert plans["dualpipev, overlap"] < plans["dualpipev"]
        assert min(plans, key=plans.__getitem__) == "combined_zb1p x4, overlap, 1 more W pending"


def real_compute(rank: int, names: list[str]) -> list[list[str]]:
    sys.path.append(str(ROOT))
    from benchmarks import compute

    options = "--layers 4 --hidden-size 32 --heads 2 --seq-length 64 --microbatches 4 --rounds 1"
    return compute.measure(rank, compute.parse(options.split()), names)


@pytest.mark.soak
@with_torchs_pipelines
def test_real_compute(ranks: RankPool) -> None:
    names = [
        "stages alone",
        "bare-loop zbv",
        "megapipe gpipe",
        "megapipe 1f1b (deferring layers)",
        "torch 1F1B",
    ]
    rows, _ = ranks.run(2, real_compute, names)
    assert [row[0] for row in rows] == names
    assert all(float(row[-1]) < 1e-6 for row in rows[1:])
    peaks = {row[0]: [float(peak) for peak in row[-2].split(", ")] for row in rows}
    assert peaks["megapipe gpipe"][0] > 1.5 * peaks["megapipe 1f1b (deferring layers)"][0]  # 4 microbatches and 2


@pytest.mark.soak
@with_torchs_pipelines
def test_all_tables_of_the_gpu_benchmark_where_there_is_none(tmp_path: Path) -> None:
    command = (
        "-m benchmarks.gpu --device cpu --dtype float32 --layers 2 --hidden-size 64 --heads 2 --seq-length 32 "
        "--microbatches 2 --repeats 1 --captures eager,captured --memory-ranks 2"
    )
    subprocess.run(
        [sys.executable, "-W", "ignore", *command.split(), "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=2 * PATIENCE,
        check=True,
    )
    documented = set(re.findall(r"<!-- table (gpu-\S+) -->", (ROOT / "benchmarks" / "TABLES.md").read_text()))
    assert {path.stem for path in tmp_path.iterdir()} == documented
    memory = (tmp_path / "gpu-schedules-memory.md").read_text()
    peaks = {
        name: [float(peak) for peak in row.split(",")]
        for name, row in re.findall(r"\| (\w+) +\| ([\d., ]+) \| gloo", memory)
    }
    assert peaks["gpipe"][0] > 1.5 * peaks["1f1b"][0] > 0  # 4 microbatches and 2
    assert "layers of hidden 64" in memory
    assert "| torch ZBVZeroBubble " in (tmp_path / "gpu-schedules.md").read_text()


def waiting_receives(rank: int) -> Any:
    sys.path.append(str(ROOT))
    from benchmarks import gpu, gpu_stages

    options = "--device cpu --dtype float32 --layers 1 --hidden-size 64 --heads 2 --seq-length 32 --repeats 1"
    return gpu_stages.measure(rank, gpu.parse([*options.split(), "--captures", "eager"]))


def test_gpu_benchmark_of_waiting_receives(ranks: RankPool) -> None:
    ((waiting, captured),) = ranks.run(1, waiting_receives)
    assert [row[0] for row in waiting] == ["0", "1", "4", "16", "32"]
    assert waiting[0][2::2] == ["1.000"] * 3
    assert [row[0] for row in captured] == ["eager"]


def test_gpu_benchmark_is_skipped_with_a_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from benchmarks import gpu

    gpu.main(["--folder", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_table_of_another_torch_bears_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would take the place of the one measured with the torch of constraints.txt."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks import tables

    (usual,) = re.findall(r"^torch==(.+)$", tables.CONSTRAINTS.read_text(), flags=re.MULTILINE)
    for version in (f"{usual}+cpu", f"{usual}0"):
        monkeypatch.setattr(torch, "__version__", version)
        tables.save_table("table", "Title", "a", [["1"]], folder=tmp_path)
    own, other = sorted(tmp_path.glob("*.md"), key=lambda path: len(path.name))
    assert (own.stem, other.stem) == ("table", f"table-torch-{usual}0")
    assert own.read_text().startswith("**Title**")
    assert other.read_text().startswith(f"**Title, torch {usual}0**")


OPTIONS = "--pp 2 --microbatches 4 --milliseconds 1 --steps 3"


def steps_without_a_barrier(rank: int) -> list[list[str]]:
    sys.path.append(str(ROOT))
    from benchmarks import steps

    cases = [case for case in steps.CASES if case[0].startswith(("megapipe", "torch"))]
    steps.CASES, everything = cases, steps.CASES
    try:
        return steps.measure(rank, steps.parse(OPTIONS.split()))
    finally:
        steps.CASES = everything


@pytest.mark.soak
@with_torchs_pipelines
def test_steps_without_a_barrier(ranks: RankPool) -> None:
    for rows in ranks.run(2, steps_without_a_barrier):
        assert len(rows) == 8
        assert all(float(row[2]) > 1.0 for row in rows)  # nothing is faster than the ideal


def test_the_plan_of_two_pipelines_in_opposite_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    """DualPipe's. Cut at the turn: stage 2 begins with data of its own, and stage 1 has a loss."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.emulation import TwoWayPlan

    rows = [["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "1B0", "2B0"]]
    actions = [[Action(int(name[0]), name[1].replace("B", "BW"), 0) for name in row] for row in rows]
    plan = TwoWayPlan(**vars(plan_of("two ways", actions)))
    assert plan.simulate([1.0] * 4, [1.0] * 4, [1.0] * 4).makespan == 6.0  # nobody ever waits
