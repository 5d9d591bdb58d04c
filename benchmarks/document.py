"""Put the saved tables into docs/benchmarks.md, each between its markers.

python -m benchmarks.document
"""

from __future__ import annotations

import re
from pathlib import Path

from .tables import FOLDER

DOCUMENT = Path(__file__).parent.parent / "docs" / "benchmarks.md"


def main() -> None:
    text = DOCUMENT.read_text()

    def table(match: re.Match[str]) -> str:
        path = FOLDER / f"{match[1]}.md"
        if not path.exists():
            return match[0]
        return f"<!-- table {match[1]} -->\n\n{path.read_text().strip()}\n\n<!-- end -->"

    DOCUMENT.write_text(re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
