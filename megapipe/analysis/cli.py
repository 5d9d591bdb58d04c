"""The command `megapipe`: look at schedules, and compare them, before they run and after."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import megapipe

from .commands import COMMANDS

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the command's name; None takes those of the process.

    Returns:
        Its exit status: 2 for wrong arguments, after one sentence about what is wrong; 1 where its output is not read
        to the end, as in `megapipe compare ... | head`; 130 where it was interrupted.
    """
    try:
        status = _run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so when it ends
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _run(arguments: Sequence[str] | None) -> int:
    parser = _parser()
    try:
        args = parser.parse_args(arguments)
    except SystemExit as done:  # argparse has printed the help, the version, or what is wrong
        return int(done.code or 0)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        args.run(args)
    except BrokenPipeError:
        raise
    except (ValueError, OSError) as error:
        print(f"megapipe {args.command}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megapipe", description="Look at schedules, before they run and after.")
    parser.add_argument("--version", action="version", version=f"megapipe {megapipe.__version__}")
    parser.set_defaults(parser=parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser
