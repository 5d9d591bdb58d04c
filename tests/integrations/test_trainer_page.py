"""The script of docs/tutorials/trainer.md, plain and with its two changed lines."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/tutorials/trainer.md").read_text()
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def scripts() -> tuple[str, str]:
    """The plain one, and the one for four ranks; of four steps instead of twenty."""
    plain = re.search(r"```py\n(.*?)```", PAGE, re.DOTALL)[1]  # type: ignore[index]
    for line, fewer in (("max_steps=20", "max_steps=4"), ("eval_steps=10", "eval_steps=2"), ("_steps=5", "_steps=1")):
        assert line in plain
        plain = plain.replace(line, fewer)
    lines = re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)[1].splitlines()  # type: ignore[index]
    changed = plain
    for before, after in zip(lines[::2], lines[1::2]):
        assert (before[0], after[0]) == ("-", "+")
        assert changed.count(f"{before[1:]}\n") == 1
        changed = changed.replace(f"{before[1:]}\n", f"{after[1:]}\n")
    return plain, changed


def run(folder: Path, script: str, *launcher: str) -> list[dict[str, float]]:
    """What was logged."""
    folder.mkdir()
    (folder / "train.py").write_text(script)
    own = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **own, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, "train.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (folder / "trained" / "model.safetensors").exists()
    state = json.loads((folder / "out" / "checkpoint-4" / "trainer_state.json").read_text())
    return list(state["log_history"])


def test_two_lines_are_changed_and_the_losses_stay(tmp_path: Path) -> None:
    plain, changed = scripts()
    assert sum(a != b for a, b in zip(plain.splitlines(), changed.splitlines())) == 2
    want, got = run(tmp_path / "plain", plain), run(tmp_path / "pipeline", changed, *TORCHRUN)
    assert len(want) == len(got) == 6
    for one, other in zip(want, got):
        for name in {"loss", "eval_loss", "learning_rate", "epoch"} & one.keys():
            assert other[name] == pytest.approx(one[name], abs=1e-6)
