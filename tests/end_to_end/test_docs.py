"""docs/schedules.md, its pictures and docs/gallery.html are what `make docs` would write."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import megapipe
from megapipe.analysis.palette import COLOURS

DOCS = Path(__file__).parents[2] / "docs"
BAR = re.compile(r'<path d="M ([^"]+) z " clip-path="[^"]+" style="fill: (#\w+);')


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_page_is_up_to_date(docs: dict[str, Any]) -> None:
    assert docs["page"]() == (DOCS / "schedules.md").read_text(), "run `make docs`"
    assert docs["gallery"]() == (DOCS / "gallery.html").read_text(), "run `make docs`"
    assert sorted(path.stem for path in DOCS.glob("*.svg")) == sorted(megapipe.schedule_names()), "run `make docs`"


@pytest.mark.parametrize("name", megapipe.schedule_names())
def test_pictures_show_their_plans(docs: dict[str, Any], name: str) -> None:
    """Every action of the plan has its bar, in its place and colour, and its microbatch and slice are written there."""
    plan = docs["plan_of"](name)
    simulation = plan.simulate()
    pairs = plan.program.pairs
    expected = []
    for rank, spans in enumerate(simulation.spans):
        for index, (action, start, end) in enumerate(spans):
            if index in pairs[rank]:  # as long as both, in the upper half
                end = spans[index + 1].end
            elif index in pairs[rank].values():
                start = spans[index - 1].start
            expected.append((rank, action, start, end, index in pairs[rank].values()))
    picture = re.sub(r"\s+", " ", (DOCS / f"{name}.svg").read_text())
    colours = {colour for shades in COLOURS.values() for colour in shades}
    bars = [(corners_of(points), colour) for points, colour in BAR.findall(picture) if colour in colours]
    assert len(bars) == len(expected), "run `make docs`"
    left, right = min(bar[0][0] for bar in bars), max(bar[0][1] for bar in bars)
    scale = (right - left) / simulation.makespan
    rows = sorted({bar[0][2] for bar, (*_, below) in zip(bars, expected) if not below})
    assert len(rows) == plan.pp_size
    for ((x0, x1, y), colour), (rank, action, start, stop, below) in zip(bars, expected):
        assert (x0 - left, x1 - left) == pytest.approx((scale * start, scale * stop), abs=1e-3)
        assert y > rows[rank] if below else y == rows[rank]
        assert colour == COLOURS[action.kind][plan.chunk_of(action.stage) % 2]
    written = re.findall(r">(\d+(?:\.\d+)?)</text>", picture)
    units = [action.unit for _, action, *_ in expected]
    assert any(written[at : at + len(units)] == units for at in range(len(written)))


def test_the_gallery_has_what_the_plans_say(docs: dict[str, Any]) -> None:
    """Each letter is an action, in its order and at its time."""
    plan = docs["plan_of"]("dualpipev", 2, 3)
    simulation = plan.simulate()
    for spans, pairs, letters in zip(simulation.spans, plan.program.pairs, docs["letters_of"](plan)):
        assert letters.count("+") == len(pairs) > 0
        kinds = [docs["ORDER"][(ord(letter) - 65) % 4] for letter in letters if letter not in "+."]
        assert kinds == [action.kind for action, *_ in spans]
        length = sum({"+": 0, ".": 1}.get(letter, 2 if (ord(letter) - 65) % 4 == 1 else 1) for letter in letters)
        assert length == round(2 * spans[-1].end)


def corners_of(points: str) -> tuple[float, float, float]:
    """Left, right and top of a rectangle."""
    numbers = [float(number) for number in points.replace("L", "").split()]
    return min(numbers[::2]), max(numbers[::2]), min(numbers[1::2])
