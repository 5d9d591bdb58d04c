"""Names that are imported when they are first used (PEP 562), so that a program loads what it needs and no more."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any


def names_on_first_use(face: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose imports stand under `if TYPE_CHECKING:`, where type checkers
    read them: they say where each name lies. Its modules are found too.

    Args:
        face: `__name__` of the package.
    """
    where: dict[str, tuple[str, str | None]] = {}

    def find(name: str) -> Any:
        if not where:
            where.update(_imports(face))
        if name not in where and (name.startswith("_") or importlib.util.find_spec(f"{face}.{name}") is None):
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        module, attribute = where.get(name, (f"{face}.{name}", None))
        found = importlib.import_module(module)
        value = found if attribute is None else getattr(found, attribute)
        setattr(sys.modules[face], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[face]), *sys.modules[face].__all__})

    return find, names


def _imports(face: str) -> Iterator[tuple[str, tuple[str, str | None]]]:
    """The names that a package imports for type checkers, each with its module and its name there; None for a module
    itself."""
    loader: Any = sys.modules[face].__spec__.loader  # type: ignore[union-attr]
    for block in ast.parse(loader.get_source(face)).body:
        if isinstance(block, ast.If) and isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING":
            for node in block.body:
                assert isinstance(node, ast.ImportFrom)
                module = importlib.util.resolve_name("." * node.level + (node.module or ""), face)
                for alias in node.names:
                    own = alias.asname or alias.name
                    yield own, (f"{module}.{alias.name}", None) if node.module is None else (module, alias.name)
