"""Generated pages and pictures are what `make docs` would write, and the reference has every public name."""

import importlib
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import megapipe
from megapipe.plan import KINDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BAR = re.compile(r'<path d="M ([^"]+) z " clip-path="[^"]+" style="fill: (#\w+);')


@pytest.fixture(scope="module")
def docs() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate.py"))


def test_the_page_is_up_to_date(docs: dict[str, Any]) -> None:
    assert docs["page"]() == (DOCS / "schedules.md").read_text(), "run `make docs`"
    assert docs["gallery"]() == (DOCS / "gallery.html").read_text(), "run `make docs`"
    assert docs["config_page"]() == (DOCS / "reference/config.md").read_text(), "run `make docs`"
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


PUBLIC = "analysis checkpoint graph integrations.megatron integrations.transformers overlap parallel_state plan slices"
PUBLIC += " training weight_grad"

BETWEEN_ROOMS = {
    "plan": "AnySchedule KINDS Kind ChannelName Event actions_of parse_json place_weights plan_of play "
    "read_text register unit_in_words",
    "weight_grad": "DeferredGrads SavedTensor add_gradient backward_context capturing deferring deferring_to "
    "save_for_w unshared visit_gradient_nodes",
    "overlap": "Segments fill_window filling_windows find_forward_segments wait_in_window",
    "parallel_state": "Groups abort_gloo abort_process_groups all_gather_json check_groups find_groups "
    "find_pipeline_group",
    "slices": "CarriedState",
    "training": "OF_EACH_GROUP load_scheduler",
}
"""What rooms of megapipe import from each other, and users do not."""


def test_the_reference_has_every_public_name() -> None:
    """By any of its names: `megapipe.plan.StageInfo` is `megapipe.StageInfo` too."""
    listed = re.findall(r"^::: (\S+)$", "".join(page.read_text() for page in DOCS.glob("reference/*.md")), re.MULTILINE)
    assert len(listed) == len(set(listed))
    described = [found(name) for name in listed] + [megapipe.PipelineConfig]
    for module in (megapipe, *(importlib.import_module(f"megapipe.{room}") for room in PUBLIC.split())):
        for name in sorted(set(module.__all__) - set(BETWEEN_ROOMS.get(module.__name__.split(".")[-1], "").split())):
            value = getattr(module, name)
            assert isinstance(value, ModuleType) or any(value is one for one in described), (
                f"{module.__name__}.{name} is missing in docs/reference/: add a line `::: {module.__name__}.{name}`"
            )


def found(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_every_page_is_in_the_navigation() -> None:
    navigation = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert sorted(navigation) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))
