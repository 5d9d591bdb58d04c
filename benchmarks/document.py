"""Put the saved tables into the pages that have them, each between its markers.

python -m benchmarks.document
"""

from __future__ import annotations

import re
from pathlib import Path

from .tables import FOLDER

DOCS = Path(__file__).parent.parent / "docs"
PAGES = [FOLDER.parent / "TABLES.md", DOCS / "reliability.md"]


def main() -> None:
    def table(match: re.Match[str]) -> str:
        path = FOLDER / f"{match[1]}.md"
        if not path.exists():
            return match[0]
        return f"<!-- table {match[1]} -->\n\n{path.read_text().strip()}\n\n<!-- end -->"

    for page in PAGES:
        page.write_text(re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, page.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
