"""The script of docs/tutorials/trainer.md, plain and with its two changed lines."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from tools.ranks import RankPool
from tools.trainers import started

ROOT = Path(__file__).parents[2]
FEWER = {
    "max_steps=20": "max_steps=2", "eval_steps=10": "eval_steps=1", "_steps=5": "_steps=1", "_steps=8": "_steps=4",
    "at + 128": "at + 16", "200_000, 128": "2_000, 16", "layers=8": "layers=4", "64:]": "8:]", "[:64]": "[:8]",
}  # fmt: skip


def scripts() -> tuple[str, str]:
    """The plain one, and the one for a pipeline: of two steps instead of twenty, with few and short rows."""
    page = (ROOT / "docs/tutorials/trainer.md").read_text()
    for number, fewer in FEWER.items():
        assert number in page
        page = page.replace(number, fewer)
    plain = re.search(r"```py\n(.*?)```", page, re.DOTALL)[1]  # type: ignore[index]
    lines = re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()  # type: ignore[index]
    changed = plain
    for before, after in zip(lines[::2], lines[1::2]):
        assert (before[0], after[0]) == ("-", "+")
        assert changed.count(f"{before[1:]}\n") == 1
        changed = changed.replace(f"{before[1:]}\n", f"{after[1:]}\n")
    return plain, changed


def run_on_rank(rank: int, world_size: int, folder: Path, script: str) -> None:
    os.chdir(folder)
    with started(rank, world_size):
        exec(compile(script, "train.py", "exec", dont_inherit=True), {"__name__": "__main__"})


def run(ranks: RankPool, num_ranks: int, folder: Path, script: str) -> list[dict[str, float]]:
    """What was logged."""
    folder.mkdir()
    ranks.run(num_ranks, run_on_rank, num_ranks, folder, script)
    assert (folder / "trained" / "model.safetensors").exists()
    state = json.loads((folder / "out" / "checkpoint-2" / "trainer_state.json").read_text())
    return list(state["log_history"])


def test_two_lines_are_changed_and_the_losses_stay(ranks: RankPool, tmp_path: Path) -> None:
    plain, changed = scripts()
    assert sum(a != b for a, b in zip(plain.splitlines(), changed.splitlines())) == 2
    want, got = run(ranks, 1, tmp_path / "plain", plain), run(ranks, 2, tmp_path / "pipeline", changed)
    assert len(want) == len(got) == 4
    for one, other in zip(want, got):
        for name in {"loss", "eval_loss", "learning_rate", "epoch"} & one.keys():
            assert other[name] == pytest.approx(one[name], abs=1e-6)
