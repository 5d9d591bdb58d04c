"""The benchmarks run. What they show is no test's business: it depends on the machine."""

import os
import subprocess
import sys
from pathlib import Path

from ranks import RankPool

from megapipe import parallel_state

ROOT = Path(__file__).parent.parent


def test_schedules_on_emulated_compute(tmp_path: Path) -> None:
    runners = "megapipe zbv,torch ZBVZeroBubble"
    command = "-m benchmarks.schedules --pp 2 --microbatches 4 --milliseconds 1 --rounds 1 --block 1"
    subprocess.run(
        [sys.executable, "-W", "ignore", *command.split(), "--runners", runners, "--folder", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=60,
        check=True,
    )
    (table,) = tmp_path.glob("*.md")
    rows = [line for line in table.read_text().splitlines() if line.startswith(("| megapipe", "| torch"))]
    assert [row.split("|")[1].strip() for row in rows] == runners.split(",")
    plans = [float(row.split("|")[6]) for row in rows]  # own plan / ideal, which does not depend on the machine
    assert plans[0] == plans[1] == 1.042


def mixture_of_experts(rank: int) -> list[list[str]]:
    sys.path.append(str(ROOT))
    from benchmarks import moe

    options = "--pp 2 --microbatches 4 --milliseconds 1 --exchange-milliseconds 0.3 --rounds 1 --block 1 --warmup 0"
    try:
        return moe.measure(rank, moe.parse(options.split()))
    finally:
        parallel_state.destroy_model_parallel()


def test_emulated_mixture_of_experts(ranks: RankPool) -> None:
    for rows in ranks.run(4, mixture_of_experts):
        names = ["dualpipev, overlap", "dualpipev, no overlap", "zbv", "1f1b", "interleaved_1f1b", "zb1p"]
        assert [row[0] for row in rows] == names
        plans = [float(row[-1]) for row in rows]  # which do not depend on the machine
        assert plans[0] < min(plans[1:])


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


def test_steps_without_a_barrier(ranks: RankPool) -> None:
    for rows in ranks.run(2, steps_without_a_barrier):
        assert len(rows) == 8
        assert all(float(row[2]) > 1.0 for row in rows)  # nothing is faster than the ideal
