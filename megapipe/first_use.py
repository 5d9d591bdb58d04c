"""Names that are imported when they are first used (PEP 562), so that a program loads what it needs and no more."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from .names import NAMES


def names_on_first_use(face: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose imports stand under `if TYPE_CHECKING:`, where type checkers
    read them. `NAMES` says where each name lies. Modules of the package are found too.

    Args:
        face: `__name__` of the package.
    """
    where = {name: module for module, names in NAMES.get(face, {}).items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in where and (name.startswith("_") or importlib.util.find_spec(f"{face}.{name}") is None):
            raise AttributeError(f"module {face!r} has no attribute {name!r}")
        found = importlib.import_module(f"{face}.{where.get(name, name)}")
        value = getattr(found, name) if name in where else found
        setattr(sys.modules[face], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[face]), *sys.modules[face].__all__})

    return find, names
