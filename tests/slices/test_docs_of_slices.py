"""The table of docs/long_context.md is what plans say."""

import re
from pathlib import Path

from megapipe.plan import make_plan

PAGE = Path(__file__).parents[2] / "docs" / "long_context.md"


def test_the_table_is_that_of_plans() -> None:
    rows = re.findall(r"^\| (\d+), (\d+) \| (.+) \|$", PAGE.read_text(), flags=re.MULTILINE)
    assert len(rows) == 4
    for pp_size, num_microbatches, cells in rows:
        for num_slices, cell in zip((1, 2, 4, 8), cells.split(" | "), strict=True):
            simulation = make_plan("seq1f1b", int(pp_size), int(num_microbatches), num_slices=num_slices).simulate()
            held = f"{max(simulation.peak_activations) + 1e-9:.2f}".rstrip("0").rstrip(".")  # 1.375 is 1.38
            assert cell == f"{100 * max(simulation.bubble):.1f}%, {held}"
