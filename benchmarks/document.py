"""Put the saved tables into TABLES.md, each between its markers; those of GPUs by whatever torch they were measured.

python -m benchmarks.document
"""

from __future__ import annotations

import re

from .tables import FOLDER

PAGE = FOLDER.parent / "TABLES.md"


def main() -> None:
    def table(match: re.Match[str]) -> str:
        releases = sorted(FOLDER.glob(f"{match[1]}-torch-*.md"), key=lambda p: [*map(int, re.findall(r"\d+", p.stem))])
        found = [*releases, *FOLDER.glob(f"{match[1]}.md")]
        return f"<!-- table {match[1]} -->\n\n{found[-1].read_text().strip()}\n\n<!-- end -->" if found else match[0]

    PAGE.write_text(re.sub(r"<!-- table (\S+) -->.*?<!-- end -->", table, PAGE.read_text(), flags=re.DOTALL))


if __name__ == "__main__":
    main()
