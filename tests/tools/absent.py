"""Stands for packages that trainers import and do not use here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any, ClassVar


class Anything(types.ModuleType):
    """A module of which everything can be imported."""

    __version__ = "3.0.0"
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[:1].isupper() else Anything(name)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return args[0] if args and callable(args[0]) else self  # as a decorator


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds these packages, and what is in them."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, *others: Any) -> Any:
        is_absent = f"{name}.".startswith(tuple(f"{package}." for package in self.packages))
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Anything(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass
