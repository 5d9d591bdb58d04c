"""Pictures and pages. The pages are opened in a browser, as their readers do."""

import itertools
import random
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.text import Annotation, Text
from tools.measured import as_measured
from tools.ranks import PATIENCE

from megapipe.analysis import save_picture
from megapipe.analysis.cells import levels_of
from megapipe.analysis.comparison import points_of, save_comparison
from megapipe.analysis.fold import find_cut
from megapipe.analysis.memory import Memory
from megapipe.analysis.pages import save_html
from megapipe.analysis.palette import DARK, LIGHT, ink_on
from megapipe.plan import KINDS, Action, Span, make_plan

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")

# Points at the cell of an action.
POINT_AT = """
<script>
const place = PLACE.join();
document.querySelector(`[data-at="${place}"]`).dispatchEvent(new PointerEvent("pointermove", { bubbles: true }));
</script>
"""


def browse(page: Path, screenshot: Path) -> str:
    """Open a page in headless chromium. Returns its DOM once its scripts have run."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1000,500"]
    command += [f"--user-data-dir={screenshot.parent / 'profile'}", "--virtual-time-budget=3000"]
    command += ["--dump-dom", f"--screenshot={screenshot}", page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout


def share_of(colour: str, screenshot: Path) -> float:
    wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return float((abs(imread(screenshot)[:, :, :3] - wanted).max(axis=2) < 0.02).mean())


@needs_chromium
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    page, screenshot = tmp_path / "plan.html", tmp_path / "plan.png"
    plan = make_plan("zbv", 4, 8)
    save_html(plan, plan.simulate(p2p=0.25), page)
    place = [0, 2, plan.actions[2].index(Action(5, "B", 3))]
    page.write_text(page.read_text().replace("</html>", POINT_AT.replace("PLACE", str(place)) + "</html>"))
    dom = browse(page, screenshot)
    assert len(re.findall(r'data-at="\d', dom)) == sum(map(len, plan.actions))
    for kind in ("F", "B", "W"):
        for colour in KINDS[kind].colours:
            assert share_of(colour, screenshot) > 0.01
    tip = re.sub(r"<[^>]+>", "", dom[dom.index('class="tip"') :])
    assert "5B3: input gradient of microbatch 3 through stage 5" in tip
    assert "after waiting" in tip
    assert "needs 6B3 of rank 1" in tip


def test_a_page_is_small_and_loads_nothing(tmp_path: Path) -> None:
    """A page held all of plotly: 4.5 MB."""
    plan = make_plan("zbv", 8, 128)
    save_html(plan, plan.simulate(p2p=0.1), tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert len(page) < 300_000
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=|@import|url\(", page)


def test_a_measured_step_above_its_plan(tmp_path: Path) -> None:
    plan = make_plan("1f1b", 3, 4)
    page, picture = tmp_path / "step.html", tmp_path / "step.svg"
    measured = as_measured(plan.simulate(p2p=0.5), pause=0.125)
    save_html(plan, plan.simulate(), page, measured)
    save_picture(plan, plan.simulate(), picture, measured)
    assert "waits 1.375 ms for what 1F0 needs" in page.read_text()
    for title in ("measured: waits for messages in grey, the host in white", "by the plan"):
        assert f'"title":"{title}"' in page.read_text()
        assert f">{title}</text>" in picture.read_text()
    assert picture.read_text().count(">rank 2</text>") == 2


# Timelines


def test_a_legend_names_what_is_drawn(tmp_path: Path) -> None:
    texts = {}
    for name in ("inference", "1f1b", "dualpipev"):
        plan = make_plan(name, 2, 4)
        save_picture(plan, plan.simulate(), tmp_path / "plan.svg")
        texts[name] = re.findall(r">([^<>]+)</text>", (tmp_path / "plan.svg").read_text())
    held = "microbatches held, with the most at the right"
    assert "forward" in texts["inference"]
    assert not {"backward", held} & set(texts["inference"])
    assert {"forward", "backward", held} <= set(texts["1f1b"])
    assert "weight gradient" not in texts["1f1b"]
    assert {"weight gradient", "F above B: overlapped pair", "dark: odd chunks"} <= set(texts["dualpipev"])


def test_what_a_rank_holds_over_time() -> None:
    plan = make_plan("1f1b", 2, 2)
    rows = levels_of(plan, plan.simulate().spans)
    assert rows[1] == [(1, 1, 4), (1, 4, 7)]
    assert [level.held for level in rows[0]] == [1, 2, 1]
    for name in ("zbv", "seq1f1b", "dualpipev"):
        plan = make_plan(name, 4, 8, num_slices=2 if name == "seq1f1b" else 1)
        simulation = plan.simulate()
        peaks = [max(level.held for level in row) for row in levels_of(plan, simulation.spans)]
        assert peaks == pytest.approx(simulation.peak_activations)


@pytest.mark.parametrize("name", ["1f1b", "zbv", "interleaved_1f1b", "dualpipev"])
def test_a_steady_phase_is_folded(name: str) -> None:
    """What remains is what fewer microbatches take, in the same places."""
    plan = make_plan(name, 4, 128)
    simulation = plan.simulate()
    cut = find_cut(plan, simulation.spans, 60.0)
    assert cut is not None
    assert cut.repeats > 20
    fewer = make_plan(name, 4, 128 - round(cut.length / 3)).simulate()  # F + B + W: nobody waits in that phase
    assert simulation.makespan - cut.length == pytest.approx(fewer.makespan)

    def kind_at(spans: list[Span], time: float) -> str:
        return next((action.kind for action, start, end in spans if start < time < end), "")

    for spans, expected in zip(simulation.spans, fewer.spans):
        for place in np.arange(0.25, fewer.makespan, 0.5):
            assert kind_at(spans, cut.time_at(place)) == kind_at(expected, place)
    assert cut.time_at(cut.place(simulation.makespan)) == pytest.approx(simulation.makespan)


def test_long_pictures_are_bounded(tmp_path: Path) -> None:
    """A step of 128 microbatches was drawn in 4800 pixels, and no number could be read."""
    path, text = tmp_path / "plan.png", tmp_path / "plan.svg"
    for name, note in (("1f1b", "x 123"), ("gpipe", "left out: 281 of time")):
        plan = make_plan(name, 4, 128)
        save_picture(plan, plan.simulate(), text)
        assert note in text.read_text()
    save_picture(plan, plan.simulate(), path)
    assert imread(path).shape[1] < 3400
    short = make_plan("1f1b", 4, 8)
    assert find_cut(short, short.simulate().spans, 33.0) is None


# Colours


def linear(colour: str) -> np.ndarray:
    channels = np.array(list(bytes.fromhex(colour[1:]))) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIELAB, in which distances are what eyes see, of linear light."""
    to_xyz = np.array([[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]])
    x, y, z = np.cbrt(to_xyz @ light / [0.9505, 1, 1.0888])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


# Of linear light: Machado, Oliveira and Fernandes, 2009, with no cone of a kind left.
SIGHTS = {
    "all cones": np.eye(3),
    "deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "tritanopia": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
SHOWN = sorted({colour for kind in KINDS.values() for colour in kind.colours})


@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_are_told_apart(sight: str) -> None:
    """The green of backwards and the yellow of weight gradients were one to the colour-blind."""
    seen = [lab(np.clip(np.array(SIGHTS[sight]) @ linear(colour), 0, 1)) for colour in SHOWN]
    assert min(np.linalg.norm(one - other) for one, other in itertools.combinations(seen, 2)) > 20


def test_colours_differ_in_print() -> None:
    """Without colour each is as bright as no other: lightness goes from 0 to 100."""
    lightness = sorted(lab(linear(colour))[0] for colour in SHOWN)
    assert min(np.diff(lightness)) > 8


def test_labels_can_be_read() -> None:
    def contrast(one: str, other: str) -> float:
        lights = sorted(float(linear(colour) @ [0.2127, 0.7152, 0.0722]) + 0.05 for colour in (one, other))
        return lights[1] / lights[0]

    for colour in SHOWN:
        assert contrast(colour, ink_on(colour)) > 4.5
    for scheme in (LIGHT, DARK):
        assert contrast(scheme.text, scheme.page) > 7
        assert contrast(scheme.faint, scheme.page) > 3


def test_a_schedule_as_large_as_the_limit_fits() -> None:
    plan = make_plan("1f1b", 4, 8)
    for limit, fits in ((4.0, True), (3.9, False)):
        (point,) = points_of([(plan, plan.simulate())], Memory(limit=limit))
        assert point.fits == fits


@pytest.mark.parametrize("seed", range(4))
def test_no_label_of_a_comparison_lies_on_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random.seed(seed)
    rows = []
    for name in ("gpipe", "1f1b", "looped_bfs", "interleaved_1f1b") * 3:
        plan = make_plan(name, 4, 8)
        simulation = plan.simulate(random.choice([1.0, 1.1, 1.2]))
        simulation.peak_activations = [random.choice([3.0, 4.0, 4.5, 8.0])]
        rows.append((plan, simulation))
    figures = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **kwargs: figures.append(figure))
    save_comparison(rows, tmp_path / "chart.png", Memory(limit=4))
    labels = [text for text in figures[0].axes[0].texts if isinstance(text, Annotation)]
    boxes = []
    for label in labels:
        label.get_window_extent()
        boxes.append(Text.get_window_extent(label))
    assert len(boxes) > 5
    for index, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:index])
