"""Generated pages and pictures are what `make docs` would write, and the reference has every public name."""

import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import megapipe
from megapipe.integrations import torch_pipelining
from megapipe.plan import KINDS, find_schedule, make_plan
from megapipe.schedules import _groups

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BAR = re.compile(r'<path d="M ([^"]+) z " clip-path="[^"]+" style="fill: (#\w+);')


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_page_is_up_to_date(docs: dict[str, Any]) -> None:
    assert docs["page"]() == (DOCS / "schedules.md").read_text(), "run `make docs`"
    assert docs["index_page"]() == (DOCS / "index.md").read_text(), "run `make docs`"
    assert docs["config_page"]() == (DOCS / "reference/config.md").read_text(), "run `make docs`"
    assert docs["limits_page"]() == (DOCS / "limits.md").read_text(), "run `make docs`"
    assert sorted(path.stem for path in DOCS.glob("*.svg")) == sorted(megapipe.schedule_names()), "run `make docs`"


def value(formula: str, **names: int) -> float:
    """Of a formula of docs/schedules.md, where a space between two factors is a product."""
    most = formula.endswith(", at most m")
    formula = re.sub(r", at most m$|^at most |^about | on the first|, (?:0|less) .*", "", formula)
    number = eval(re.sub(r"(?<=[\w)]) (?=[\w(])", "*", formula), {"min": min, **names})
    return float(min(number, names["m"]) if most else number)


@pytest.mark.parametrize("pp_size", [2, 3])
@pytest.mark.parametrize("name", sorted({*megapipe.schedule_names()} - {"no_pipelining", "inference"}))
def test_formulas_are_those_of_the_plans(docs: dict[str, Any], name: str, pp_size: int) -> None:
    """The page said of no formula from how many microbatches on it holds. By its own plan zb1p has a bubble of 45.5 %
    on 4 ranks with 2 microbatches, where the formula gives 33.3 %."""
    schedule, note = find_schedule(name), docs["NOTES"][name]
    n = 2 if schedule.slices else 1
    for v in (schedule.num_chunks,) if schedule.num_chunks else (2, 3):
        least = int(value(note.least, p=pp_size, m=0))
        for m in range(least, least + 2 * pp_size + 1):
            smallest = -(-pp_size // n)
            names = {"p": pp_size, "m": m, "v": v, "n": n, "N": n * _groups(m, smallest, smallest)[0]}
            simulation = make_plan(name, pp_size, m, num_chunks=v, num_slices=n).simulate()
            about = 0.051 if note.bubble.startswith("about") else 1e-9
            assert max(simulation.bubble) == pytest.approx(value(note.bubble, **names), abs=about), names
            for rank, peak in enumerate(simulation.peak_activations):
                held = value(note.in_flight, r=rank, **names)
                is_most = note.in_flight.startswith("at most") or (" on the first" in note.in_flight and rank > 0)
                assert peak <= held + 1e-9 if is_most else peak == pytest.approx(held), (rank, names)


def test_few_microbatches_have_larger_bubbles() -> None:
    """As docs/schedules.md says."""
    page = (DOCS / "schedules.md").read_text()
    bubbles = [max(make_plan("zb1p", 4, m).simulate().bubble) for m in (4, 2)]
    assert (
        "zb1p on 4 ranks has {:.1%} with 4 microbatches, and {:.1%} with 2".format(*bubbles).replace("%", " %") in page
    )
    assert "(2 * 3 + 1 * 4 + 1) / 2 =\n5.5 microbatches" in page
    assert make_plan("interleaved_1f1b", 4, 8).simulate().peak_activations[::3] == [5.5, 2.5]
    for name, sizes in (
        ("v_half", "3 microbatches of 4, 5 of 8, 9 of 16"),
        ("v_min", "2 microbatches of 4, 4 of 8, 6 of 16"),
    ):
        peaks = [max(make_plan(name, p, 2 * p).simulate().peak_activations) for p in (4, 8, 16)]
        assert sizes == "{:g} microbatches of 4, {:g} of 8, {:g} of 16".format(*peaks)
        assert f"({sizes})" in page.replace("\n", " ")


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
    colours = {colour for kind in KINDS.values() for colour in kind.colours}
    bars = [(corners_of(points), colour) for points, colour in BAR.findall(picture) if colour in colours]
    assert len(bars) == len(expected), "run `make docs`"
    left, right = min(bar[0][0] for bar in bars), max(bar[0][1] for bar in bars)
    scale = (right - left) / simulation.makespan
    rows = sorted({bar[0][2] for bar, (*_, below) in zip(bars, expected) if not below})
    assert len(rows) == plan.pp_size
    for ((x0, x1, y), colour), (rank, action, start, stop, below) in zip(bars, expected):
        assert (x0 - left, x1 - left) == pytest.approx((scale * start, scale * stop), abs=1e-3)
        assert y > rows[rank] if below else y == rows[rank]
        assert colour == KINDS[action.kind].colours[plan.chunk_of(action.stage) % 2]
    written = re.findall(r">(\d+(?:\.\d+)?)</text>", picture)
    units = [action.unit for _, action, *_ in expected]
    assert any(written[at : at + len(units)] == units for at in range(len(written)))


def corners_of(points: str) -> tuple[float, float, float]:
    """Left, right and top of a rectangle."""
    numbers = [float(number) for number in points.replace("L", "").split()]
    return min(numbers[::2]), max(numbers[::2]), min(numbers[1::2])


ROOMS = sorted({".".join(face.parent.relative_to(ROOT).parts) for face in (ROOT / "megapipe").rglob("__init__.py")})


def test_the_reference_has_every_public_name() -> None:
    """By any of its names: `megapipe.plan.StageInfo` is `megapipe.StageInfo` too."""
    pages = "".join(page.read_text() for page in DOCS.glob("reference/*.md"))
    listed = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(listed) == len(set(listed))
    described = [found(name) for name in listed] + [megapipe.PipelineConfig]
    for module in map(importlib.import_module, [*ROOMS, "megapipe.parallel_state"]):
        for name in module.__all__:
            value = getattr(module, name)
            is_torchs = module is torch_pipelining and f"`{name}`" in pages  # whose docstring is torch's
            assert isinstance(value, ModuleType) or is_torchs or any(value is one for one in described), (
                f"{module.__name__}.{name} is missing in docs/reference/: add a line `::: {module.__name__}.{name}`"
            )


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
