"""The labs: pictures on their pages come out, holes are found, and mistakes are said. `make labs` runs all."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from megapipe.analysis import as_text
from megapipe.analysis.command_options import import_schedule
from megapipe.plan import make_plan, registry
from megapipe.proving import check_sizes, schedule_proof

LABS = Path(__file__).parents[2] / "labs"
sys.path.append(str(LABS))

import check  # noqa: E402

PICTURES = {
    "gpipe": ("gpipe", 4, 4),
    "one_f_one_b": ("1f1b", 4, 6),
    "interleaving": ("interleaved_1f1b", 3, 6),
    "split_backward": ("zb1p", 4, 6),
    "zbv": ("zbv", 3, 6),
    "hang": (f"{LABS}/answers/hang.py:solution", 4, 6),
}
HOLES = {
    "gpipe": ("my_gpipe", "rank 0 ended its step after 0 calls of recv_forward(0); there are 1 microbatches."),
    "one_f_one_b": ("my_1f1b", "TypeError: 'ellipsis' object cannot be interpreted as an integer (one_f_one_b.py:"),
    "interleaving": ("my_interleaved", "TypeError: 'ellipsis' object is not iterable (interleaving.py:"),
    "split_backward": ("my_zb1p", "rank 0 ended its step without the Ws of 1 microbatches of chunk 0."),
    "zbv": ("my_v", "TypeError: 'ellipsis' object cannot be interpreted as an integer (zbv.py:"),
    "hang": ("my_eager", "my_eager would hang: rank 0 waits at 0B0"),
}


@pytest.fixture(autouse=True)
def forgotten() -> Any:
    """Schedules of a test are gone after it."""
    before = dict(registry._schedules)
    yield
    registry._schedules.clear()
    registry._schedules.update(before)


@pytest.mark.parametrize("lab", check.LABS)
def test_pages_and_holes(lab: str) -> None:
    page = (LABS / f"{lab}.md").read_text()
    name, *sizes = PICTURES[lab]
    assert as_text(make_plan(import_schedule(name), *sizes)) in page
    hole, text = HOLES[lab]
    assert f"megapipe prove labs/{lab}.py:{hole} --like" in page
    assert text in str(check_sizes(import_schedule(f"{LABS}/{lab}.py:{hole}")))


@pytest.mark.parametrize("lab", ["gpipe", *(pytest.param(lab, marks=pytest.mark.soak) for lab in check.LABS[1:])])
def test_solutions_and_mistakes(lab: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_proof, "RANKS", (2,))  # `make labs` takes 4, too
    assert check.check(lab, tell=lambda text: None) == []
