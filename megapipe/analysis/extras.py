"""Packages that only an extra installs."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_extra"]


def import_extra(package: str, extra: str = "viz") -> Any:
    """Import a package that only `extra` installs. Raises ValueError where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"this needs {package}: pip install 'megapipe[{extra}]'.") from None
