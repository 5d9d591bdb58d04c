"""The benchmarks run. What they show is no test's business: it depends on the machine."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tools.ranks import PATIENCE

from megapipe.plan import Action, plan_of

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
GPU = "--device cpu --dtype float32 --hidden-size 64 --heads 2 --seq-length 32 --repeats 1"

with_torchs_pipelines = pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch's own pipelining, a peer in this, aborts with 2.9"
)


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_their_imports_exist() -> None:
    """The names of megapipe that a benchmark uses, also where `make test` does not run it."""
    for path in sorted(BENCHMARKS.glob("*.py")):
        importlib.import_module(f"benchmarks.{path.stem}")


Tables = dict[str, list[list[str]]]
"""By name, the cells of each row."""


def tables_in(folder: Path) -> Tables:
    return {path.stem: rows_of(path.read_text()) for path in folder.glob("*.md")}


def rows_of(text: str) -> list[list[str]]:
    _, _, *rows = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]


def check_schedules(tables: Tables) -> None:
    (rows,) = tables.values()
    assert [row[5] for row in rows] == ["1.042"] * 2  # plan / ideal, which does not depend on the machine


def check_experts(tables: Tables) -> None:
    (rows,) = tables.values()
    plans = {row[0]: float(row[6]) for row in rows}  # which do not depend on the machine
    assert len(plans) == 13
    assert plans["dualpipev, overlap"] < plans["dualpipev"]
    assert min(plans, key=plans.__getitem__) == "combined_zb1p x4, overlap, 1 more W pending"


def check_compute(tables: Tables) -> None:
    (rows,) = tables.values()
    assert all(float(row[-1]) < 1e-6 for row in rows[1:])
    peaks = {row[0]: [float(peak) for peak in row[-2].split(", ")] for row in rows}
    assert peaks["megapipe gpipe"][0] > 1.5 * peaks["megapipe 1f1b (deferring layers)"][0]  # 4 microbatches and 2


def check_steps(tables: Tables) -> None:
    (rows,) = tables.values()
    assert all(float(row[2]) > 1.0 for row in rows)  # nothing is faster than the ideal


def check_gpu(tables: Tables) -> None:
    assert tables.keys() == {*re.findall(r"<!-- table (gpu-\S+) -->", (BENCHMARKS / "TABLES.md").read_text())}
    peaks = {row[0]: [float(peak) for peak in row[1].split(",")] for row in tables["gpu-schedules-memory"]}
    assert peaks["gpipe"][0] > 1.5 * peaks["1f1b"][0] > 0  # 4 microbatches and 2
    assert "torch 1F1B" in [row[0] for row in tables["gpu-schedules"]]


def check_experts_on_a_device(tables: Tables) -> None:
    assert tables.keys() == {*re.findall(r"<!-- table (experts\S*) -->", (BENCHMARKS / "TABLES.md").read_text())}
    assert [row[1] for row in tables["experts-same"]] == ["16 of 16"] * 2
    assert [row[1:4] for row in tables["experts-pairs"]] == [["0e+00", "0e+00", "0"], ["0e+00", "0e+00", "2"]]


COMMANDS: list[tuple[str, Callable[[Tables], None] | None]] = [
    ("schedules --pp 2 --microbatches 4 --milliseconds 1 --rounds 1 --block 1 --runners "
     "'megapipe zbv,torch ZBVZeroBubble'", check_schedules),
    ("moe --pp 2 --microbatches 4 --milliseconds 1 --exchange-milliseconds 0.3 --rounds 1 --block 1 --warmup 0",
     check_experts),
    ("compute --layers 4 --hidden-size 32 --heads 2 --seq-length 64 --microbatches 4 --rounds 1 --runners "
     "'stages alone,bare-loop zbv,megapipe gpipe,megapipe 1f1b (deferring layers),torch 1F1B'", check_compute),
    ("steps --pp 2 --microbatches 4 --milliseconds 1 --steps 3", check_steps),
    (f"gpu {GPU} --layers 2 --microbatches 2 --captures eager,captured --memory-ranks 2", check_gpu),
    ("gpu_experts --device cpu --dtype float32 --hidden-size 32 --heads 2 --expert-size 16 --experts 8 --topk 2 "
     "--tokens 64 --layers 1 --repeats 2 --ways eager,captured", check_experts_on_a_device),
    ("tuned --pp 2 --rounds 2 --milliseconds 1 --schedules zbv", None),
    ("tensor_parallel --layers 2 --hidden 32 --tokens 32 --latencies 0 1 --rounds 1 --microbatches 2", None),
    ("activations --pp 2 --microbatches 4 --milliseconds 1 --rounds 1 --schedules 1f1b zbv", None),
    ("host --pp 2 --microbatches 4 --rounds 2", None),
    ("device_calls --pp 2 --microbatches 4 --schedules 1f1b", None),
    ("saving --megabytes 24 --repeats 2", None),
    ("split --repeats 4", None),
    ("capture --repeats 4", None),
    ("bytes --models small --schedules 1f1b", None),
    ("first_step --pp 2 --seconds 0.05 --no-inductor", None),
    ("large_jobs --ranks 32 --processes 2 --seconds 1", None),
]  # fmt: skip


@pytest.mark.soak
@with_torchs_pipelines
@pytest.mark.parametrize(("command", "check"), COMMANDS, ids=[command.partition(" ")[0] for command, _ in COMMANDS])
def test_they_run(tmp_path: Path, command: str, check: Callable[[Tables], None] | None) -> None:
    name, *options = shlex.split(command)
    whole = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{name}", *options, "--folder", str(tmp_path)]
    subprocess.run(whole, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=2 * PATIENCE, check=True)
    tables = tables_in(tmp_path)
    assert tables
    assert all(rows for rows in tables.values())
    if check is not None:
        check(tables)


def test_gpu_benchmark_is_skipped_with_a_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    from benchmarks import gpu

    gpu.main(["--folder", str(tmp_path)])
    assert "no CUDA device" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_table_of_another_torch_bears_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would take the place of the one measured with the torch of constraints.txt."""
    from benchmarks import tables

    (usual,) = re.findall(r"^torch==(.+)$", tables.CONSTRAINTS.read_text(), flags=re.MULTILINE)
    for version in (f"{usual}+cpu", f"{usual}0"):
        monkeypatch.setattr(torch, "__version__", version)
        tables.save_table("table", "Title", "a", [["1"]], folder=tmp_path)
    own, other = sorted(tmp_path.glob("*.md"), key=lambda path: len(path.name))
    assert (own.stem, other.stem) == ("table", f"table-torch-{usual}0")
    assert own.read_text().startswith("**Title**")
    assert other.read_text().startswith(f"**Title, torch {usual}0**")


def test_the_plan_of_two_pipelines_in_opposite_directions() -> None:
    """DualPipe's. Cut at the turn: stage 2 begins with data of its own, and stage 1 has a loss."""
    from benchmarks.emulation import TwoWayPlan

    rows = [["0F0", "3F0", "3B0", "0B0"], ["2F0", "1F0", "1B0", "2B0"]]
    actions = [[Action(int(name[0]), name[1].replace("B", "BW"), 0) for name in row] for row in rows]
    plan = TwoWayPlan(**vars(plan_of("two ways", actions)))
    assert plan.simulate([1.0] * 4, [1.0] * 4, [1.0] * 4).makespan == 6.0  # nobody ever waits
