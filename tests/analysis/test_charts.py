"""Pictures of timelines."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest

from megapipe.analysis import save_picture
from megapipe.analysis.timeline_cells import DARK, LIGHT, ink_on, levels_of
from megapipe.plan import KINDS, make_plan

# Timelines


def test_a_legend_names_what_is_drawn(tmp_path: Path) -> None:
    texts = {}
    for name in ("inference", "dualpipev"):
        plan = make_plan(name, 2, 4)
        save_picture(plan, plan.simulate(), tmp_path / "plan.svg")
        texts[name] = re.findall(r">([^<>]+)</text>", (tmp_path / "plan.svg").read_text())
    held = "microbatches held, with the most at the right"
    assert "forward" in texts["inference"]
    assert not {"backward", "weight gradient", held} & set(texts["inference"])
    others = {"backward", "weight gradient", "F above B: overlapped pair", "dark: odd chunks", held}
    assert {"forward", *others} <= set(texts["dualpipev"])


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


def test_what_ranks_hold_is_drawn_as_high_as_it_is(tmp_path: Path) -> None:
    plan = make_plan("1f1b", 2, 2)
    save_picture(plan, plan.simulate(), tmp_path / "plan.svg")
    areas = re.findall(rf'<path d="([^"]+)"[^>]*style="fill: {LIGHT.faint}', (tmp_path / "plan.svg").read_text())
    heights = []
    for area in areas[:2]:  # the third is the legend's
        bottom, *tops = sorted({float(y) for y in re.findall(r"[ML] \S+ (\S+)", area)}, reverse=True)
        heights.append([bottom - top for top in tops])
    one = heights[1][0]
    assert heights == [pytest.approx([one, 2 * one]), [one]]


def test_long_pictures_are_bounded(tmp_path: Path) -> None:
    """A step of 128 microbatches was drawn in 4800 pixels. In less it has no room
    for numbers."""
    plan = make_plan("1f1b", 2, 128)
    save_picture(plan, plan.simulate(), tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    assert ">7</text>" not in text
    (width,) = re.findall(r'<svg .*?width="([\d.]+)pt"', text, re.DOTALL)
    assert float(width) < 2040  # points, of 120 pixels to 72


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
