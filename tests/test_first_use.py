"""Names that are imported when they are used.

`python tests/test_first_use.py` writes megapipe/names.py anew.
"""

from __future__ import annotations

import ast
import pprint
from collections.abc import Iterator
from pathlib import Path

import megapipe
from megapipe.names import NAMES

PACKAGE = Path(megapipe.__file__).parent
HEAD = '''"""Where names lie that are imported when they are used (see `first_use`): packages, modules, and the names.

`python tests/test_first_use.py` writes this file, from what packages import under `if TYPE_CHECKING:`. A test compares.
"""

'''


def imports_for_types(face: Path) -> Iterator[tuple[str, list[str]]]:
    """The modules that a package imports names from for type checkers. Modules themselves are found by their names."""
    for block in ast.parse(face.read_text()).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                assert node.level == 1
                assert all(alias.asname in (None, alias.name) for alias in node.names)
                if node.module is not None:
                    yield node.module, [alias.name for alias in node.names]


def names_for_types() -> dict[str, dict[str, str]]:
    """By package and module."""
    faces = {".".join(file.relative_to(PACKAGE.parent).parts[:-1]): file for file in PACKAGE.rglob("__init__.py")}
    found = {face: dict(imports_for_types(file)) for face, file in sorted(faces.items())}
    return {face: {module: " ".join(names) for module, names in of.items()} for face, of in found.items() if of}


def test_names_are_those_that_type_checkers_see() -> None:
    assert names_for_types() == NAMES, "run `python tests/test_first_use.py`, then `make lint`"


if __name__ == "__main__":
    lines = pprint.pformat(names_for_types(), width=110, sort_dicts=False)
    (PACKAGE / "names.py").write_text(f"{HEAD}NAMES: dict[str, dict[str, str]] = {lines}\n")
