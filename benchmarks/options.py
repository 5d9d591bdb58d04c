"""A benchmark's command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from .launching import launch
from .tables import FOLDER, Table, save_table


def run(
    measure: Callable[[int, argparse.Namespace], list[Table]],
    num_ranks: Callable[[argparse.Namespace], int] | int = lambda args: args.pp,
    undisturbed: bool = True,
    **defaults: Any,
) -> None:
    """Save the tables that `measure(rank, args)` returns on the first of so many ranks.

    Args:
        defaults: of the options, see `options`.
    """
    args = options(**defaults)
    ranks = num_ranks if isinstance(num_ranks, int) else num_ranks(args)
    for table in launch(ranks, measure, args, undisturbed=undisturbed):
        save_table(*table, folder=args.folder)


def options(arguments: list[str] | None = None, **defaults: Any) -> argparse.Namespace:
    """One option for each of `defaults`, of its type, several values where that is a list; and `--folder`, where tables
    are written. The benchmark's docstring is the help."""
    parser = argparse.ArgumentParser(
        description=sys.modules["__main__"].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in {**defaults, "folder": FOLDER}.items():
        one = default[0] if isinstance(default, list) else default
        kind: dict[str, Any] = {"type": type(one), "nargs": "+" if one is not default else None}
        if isinstance(default, bool):
            kind = {"action": argparse.BooleanOptionalAction}
        parser.add_argument("--" + name.replace("_", "-"), default=default, help=f"{default}", **kind)
    return parser.parse_args(arguments)
