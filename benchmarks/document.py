"""Put the saved tables into TABLES.md, each between its markers.

python -m benchmarks.document
"""

from __future__ import annotations

import re

from .tables import FOLDER

PAGE = FOLDER.parent / "TABLES.md"


def main() -> None:
    def table(match: re.Match[str]) -> str:
        path = FOLDER / f"{match[1]}.md"
        if not path.exists():
            return match[0]
        return f"<!-- table {match[1]} -->\n\n{path.read_text().strip()}\n\n<!-- end -->"

    PAGE.write_text(re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
