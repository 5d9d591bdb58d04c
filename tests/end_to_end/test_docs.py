"""docs/schedules.md and its pictures are what `make docs` would write."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import megapipe
from megapipe.analysis.charts import COLOURS

DOCS = Path(__file__).parents[2] / "docs"
BAR = re.compile(r'<path d="M ([^"]+) z " clip-path="[^"]+" style="fill: (#\w+);')


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_page_is_up_to_date(docs: dict[str, Any]) -> None:
    assert docs["page"]() == (DOCS / "schedules.md").read_text(), "run `make docs`"
    assert sorted(path.stem for path in DOCS.glob("*.svg")) == sorted(megapipe.schedule_names()), "run `make docs`"


@pytest.mark.parametrize("name", megapipe.schedule_names())
def test_pictures_show_their_plans(docs: dict[str, Any], name: str) -> None:
    """Every action of the plan has its bar, in its place and colour, and its microbatch and slice are written there."""
    plan = docs["plan_of"](name)
    simulation = plan.simulate()
    expected = [(rank, *span) for rank, spans in enumerate(simulation.spans) for span in spans]
    picture = re.sub(r"\s+", " ", (DOCS / f"{name}.svg").read_text())
    bars = [(corners_of(points), colour) for points, colour in BAR.findall(picture)]
    assert len(bars) == len(expected), "run `make docs`"
    left, right = min(bar[0][0] for bar in bars), max(bar[0][1] for bar in bars)
    begin, end = min(start for *_, start, _ in expected), max(end for *_, end in expected)
    scale = (right - left) / (end - begin)
    rows = sorted({bar[0][2] for bar in bars})
    for ((x0, x1, y), colour), (rank, action, start, stop) in zip(bars, expected):
        assert (x0 - left, x1 - left) == pytest.approx((scale * (start - begin), scale * (stop - begin)), abs=1e-3)
        assert y == rows[rank]
        assert colour == COLOURS[action.kind][plan.chunk_of(action.stage) % 2]
    written = re.findall(r">(\d+(?:\.\d+)?)</text>", picture)
    assert written[-len(expected) :] == [action.unit for _, action, *_ in expected]


def corners_of(points: str) -> tuple[float, float, float]:
    """Left, right and top of a rectangle."""
    numbers = [float(number) for number in points.replace("L", "").split()]
    return min(numbers[::2]), max(numbers[::2]), min(numbers[1::2])
