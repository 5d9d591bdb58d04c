"""Pictures and pages. The pages are opened in a browser, as their readers do."""

import random
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from matplotlib.image import imread
from matplotlib.text import Annotation, Text
from measured import as_measured
from ranks import PATIENCE

from megapipe.analysis import save_picture
from megapipe.analysis.charts import COLOURS, points_of, save_comparison
from megapipe.analysis.pages import save_html
from megapipe.plan import make_plan

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
needs_chromium = pytest.mark.skipif(not CHROMIUM, reason="chromium is not installed")

# Points at the bar of an action, as plotly's own mouse handler does.
POINT_AT = """
<script>
const graph = document.querySelector(".plotly-graph-div");
const find = setInterval(() => {
  if (!graph.data || !graph.querySelector(".point")) return;
  clearInterval(find);
  const curve = graph.data.findIndex(trace => trace.text.includes("ACTION"));
  Plotly.Fx.hover(graph, [{curveNumber: curve, pointNumber: graph.data[curve].text.indexOf("ACTION")}]);
}, 50);
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
    page.write_text(page.read_text().replace("</body>", POINT_AT.replace("ACTION", "5B3") + "</body>"))
    dom = browse(page, screenshot)
    drawn = dom[dom.index('class="main-svg"') :]
    assert drawn.count('class="point"') == sum(map(len, plan.actions))
    for kind in ("F", "B", "W"):
        for colour in COLOURS[kind]:
            assert share_of(colour, screenshot) > 0.01
    hover = re.sub(r"<[^>]+>", "", drawn[drawn.index('class="hoverlayer"') :])
    assert "5B3: input gradient of microbatch 3 through stage 5" in hover
    assert "after waiting" in hover
    assert "needs 6B3 of rank 1" in hover


def test_a_measured_step_above_its_plan(tmp_path: Path) -> None:
    plan = make_plan("1f1b", 3, 4)
    page, picture = tmp_path / "step.html", tmp_path / "step.svg"
    measured = as_measured(plan.simulate(p2p=0.5), pause=0.125)
    save_html(plan, plan.simulate(), page, measured)
    save_picture(plan, plan.simulate(), picture, measured)
    assert "waits 1.375 for what 1F0 needs" in page.read_text()
    for title in ("measured: waits for messages in grey, the host in white", "by the plan"):
        assert f'"text":"{title}"' in page.read_text()
        assert f">{title}</text>" in picture.read_text()
    assert picture.read_text().count(">rank 2</text>") == 2


def test_a_schedule_as_large_as_the_limit_fits() -> None:
    plan = make_plan("1f1b", 4, 8)
    for limit, fits in ((4.0, True), (3.9, False)):
        (point,) = points_of([(plan, plan.simulate())], limit)
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
    save_comparison(rows, tmp_path / "chart.png", memory_limit=4)
    labels = [text for text in figures[0].axes[0].texts if isinstance(text, Annotation)]
    boxes = []
    for label in labels:
        label.get_window_extent()
        boxes.append(Text.get_window_extent(label))
    assert len(boxes) > 5
    for index, box in enumerate(boxes):
        assert not box.count_overlaps(boxes[:index])
