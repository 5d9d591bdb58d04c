"""docs/schedules.md is what `make docs` would write."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_docs_are_up_to_date(tmp_path: Path) -> None:
    runpy.run_path(str(DOCS / "generate.py"))["generate"](tmp_path)
    assert (tmp_path / "schedules.md").read_text() == (DOCS / "schedules.md").read_text(), "run `make docs`"
    pictures = {path.name for path in DOCS.glob("*.svg")}
    assert {path.name for path in tmp_path.glob("*.svg")} == pictures
    for name in pictures:
        drawn = rectangles(tmp_path / name)
        assert len(drawn) >= 8
        assert drawn == rectangles(DOCS / name), f"{name} is out of date: run `make docs`"


def rectangles(path: Path) -> list[str]:
    """What is drawn where, in which colour: text may differ between machines."""
    return re.findall(r'<path d="M [^"]+"[^>]+fill: #[^;]+;', re.sub(r"\s+", " ", path.read_text()))
