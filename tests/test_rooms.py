"""Imports go one way, down the levels of CONTRIBUTING's map, and into a room only by its `__init__`."""

import ast
import functools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import megapipe

PACKAGE = Path(megapipe.__file__).parent
MAP = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()
LEVELS = [re.findall(r"`(\w+)(?:/|\.py)`", row) for row in re.findall(r"^\| (`.+?) \|", MAP, flags=re.MULTILINE)]
LEVELS.append(["__init__", "__main__"])
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py"))


@functools.cache
def all_nodes(file: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse((PACKAGE / file).read_text()))]


def nodes(file: Path, kind: type[ast.AST]) -> list[Any]:
    return [node for node in all_nodes(file) if isinstance(node, kind)]


@functools.cache
def imports_of(file: Path) -> list[tuple[str, ...]]:
    """The modules of megapipe that a file imports, or imports from: ("plan",) or ("stages", "hooks")."""
    found = []
    for node in nodes(file, ast.ImportFrom):
        if node.level:
            base = file.parent.parts[: len(file.parent.parts) + 1 - node.level]
            path = (*base, *(node.module.split(".") if node.module else ()))
            for alias in node.names:
                below = (*path, alias.name)
                is_module = Path(*below).with_suffix(".py") in FILES or Path(*below, "__init__.py") in FILES
                found.append(below if is_module else path)
    return found


def test_imports_go_down_and_through_the_front() -> None:
    wrong = []
    for file, imported in [(one, path) for one in FILES for path in imports_of(one)]:
        own, room = file.parts[0].removesuffix(".py"), imported[0] if imported else "__init__"
        if room != own and LEVEL[room] >= LEVEL[own]:
            wrong.append(f"{file} imports {'.'.join(imported)}, which does not stand below it")
        elif room != own and len(imported) > 1 and not own.startswith("__"):
            wrong.append(f"{file} imports {'.'.join(imported)}: import it from {room}/__init__.py")
    assert wrong == []


def test_no_name_is_both_a_file_and_a_function() -> None:
    """`megapipe.graph.partition` was the function, and `megapipe.graph.partition.Partition` an AttributeError."""
    for room in {file.parent for file in FILES} - {Path()}:
        imported = [node for node in nodes(room / "__init__.py", ast.ImportFrom) if node.module]
        names = {alias.name for node in imported for alias in node.names}
        assert not names & {file.stem for file in FILES if file.parent == room}, room


def test_every_room_is_on_the_map() -> None:
    assert {file.parts[0].removesuffix(".py") for file in FILES} == LEVEL.keys()


def test_rooms_grow_for_a_reason() -> None:
    """The map says how many lines the rooms of a row have at most. A commit that needs more says why, and raises it."""
    most = [int(number.replace(",", "")) for number in re.findall(r"^\| `.*\| ([\d,]+) \|$", MAP, flags=re.MULTILINE)]
    assert len(most) == len(LEVELS) - 1
    lines: Counter[int] = Counter()
    for file in FILES:
        lines[LEVEL[file.parts[0].removesuffix(".py")]] += len((PACKAGE / file).read_text().splitlines())
    too_long = [f"{', '.join(LEVELS[level])}: {lines[level]} lines of {limit}" for level, limit in enumerate(most)]
    assert [text for level, text in enumerate(too_long) if lines[level] > most[level]] == []


BEGINS_WITHOUT_A_SUBJECT = re.compile(r"(Of|By|As|With|In|For|From|Without|Between|To|At|On|Over|Behind|Under) ")


def test_docstrings_begin_with_a_subject_or_a_verb() -> None:
    wrong = [
        f"{file}:{node.lineno}: {node.value.value.strip().splitlines()[0]}"
        for file in FILES
        for node in nodes(file, ast.Expr)
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if BEGINS_WITHOUT_A_SUBJECT.match(node.value.value.strip())
    ]
    assert wrong == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Imports for types only count too."""
    below = {
        file: {found for path in imports_of(file) if (found := as_file(path)) not in (None, file)} for file in FILES
    }
    left = dict(below)
    while free := [file for file, needed in left.items() if not needed & left.keys()]:
        for file in free:
            del left[file]
    assert sorted(map(str, left)) == []


def as_file(path: tuple[str, ...]) -> Path | None:
    """The file of a module; None for a face, which gathers what lies in files."""
    file = Path(*path).with_suffix(".py")
    return file if file in FILES else None
