"""The README's first screen works, and the pages show functions, plans and commands as they are."""

import inspect
import re
from pathlib import Path

import pytest
from tools.ranks import RankPool
from tools.scripts import run_script

import megapipe
from megapipe.analysis import as_text
from megapipe.analysis.cli import main
from megapipe.plan import make_plan

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
CONCEPTS = (ROOT / "docs/concepts.md").read_text()
HOME = (ROOT / "docs/index.md").read_text()
CHOOSING = (ROOT / "docs/choosing.md").read_text()


def test_the_function_shown_is_the_one_that_runs() -> None:
    loops = megapipe.schedules.forward_backward_pipelining_without_interleaving.loops
    parts = (megapipe.schedules.F, megapipe.schedules.BW, loops)
    assert "```python\n{}\n\n{}\n\n{}```".format(*map(inspect.getsource, parts)) in CONCEPTS


def test_the_picture_is_the_plan() -> None:
    assert as_text(make_plan("1f1b", 4, 6)) in CONCEPTS


def test_the_readme_fits_its_purpose() -> None:
    """A reader sees what it is, how to install it and what it was run on before anything else."""
    lines = README.splitlines()
    assert len(lines) <= 130
    (run_on,) = (number for number, line in enumerate(lines) if "**What it was run on:**" in line)
    assert run_on < 60


def test_the_lines_of_each_way_in_are_on_its_page() -> None:
    """Which runs: test_snippets.py, and the tests of trainers."""
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| \[[^]]+\]\(([^)]+)\) \|$", README, flags=re.MULTILINE)
    assert len(rows) == 6
    for lines, page in rows:
        text = (ROOT / page).read_text()
        assert [line for line in re.findall(r"`([^`]+)`", lines) if line not in text] == []


def test_the_script_trains(ranks: RankPool) -> None:
    """On two ranks, by another schedule, whose last stage is on the first one. `make wheel` runs it as it is."""
    (script,) = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
    assert script.count('"1f1b"') == 2
    assert script in HOME
    script = script.replace('"1f1b"', '"zbv"').replace("parallel_size=4", "parallel_size=2")
    printed, _ = ranks.run(2, run_script, script)
    losses = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step")]
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]


def test_the_command_prints_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.findall(r"^\$ megapipe (.+)\n((?:[^$`].*\n)+)", CHOOSING, flags=re.MULTILINE)
    assert len(shown) == 2
    for command, output in shown:
        assert main(command.split()) == 0
        printed = capsys.readouterr().out
        assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()
