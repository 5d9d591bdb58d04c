"""`megapipe completion`: the command, completed by a shell. Needs shtab, of the extra `completion`."""

from __future__ import annotations

import argparse
from typing import Any

from ...plan import schedule_names
from ..extras import import_extra

__all__ = ["add_completion"]

FUNCTIONS = {
    "bash": '_megapipe_schedules() {{\n  compgen -W "{names}" -- "$1"\n  _shtab_compgen_files "$1"\n}}',
    "zsh": "_megapipe_schedules() {{\n  compadd -- {names}\n  _files\n}}",
}
"""A schedule is a name or a file, by shell."""


def add_completion(commands: Any) -> None:
    completion = commands.add_parser(
        "completion",
        help="complete this command in a shell",
        description='Print a shell\'s completion of this command: eval "$(megapipe completion bash)" turns it on.',
    )
    completion.add_argument("shell", choices=("bash", "zsh", "tcsh"))
    completion.set_defaults(run=lambda args: _print_completion(commands, args.parser, args.shell))


def _print_completion(commands: Any, parser: argparse.ArgumentParser, shell: str) -> None:
    shtab = import_extra("shtab", "completion")
    for command in commands.choices.values():
        for argument in command._actions:
            if argument.dest == "schedule":
                argument.complete = {**shtab.FILE, **dict.fromkeys(FUNCTIONS, "_megapipe_schedules")}
            elif argument.metavar == "FILE" or argument.dest == "timeline":
                argument.complete = shtab.FILE
    names = " ".join(schedule_names())
    functions = {shell: function.format(names=names) for shell, function in FUNCTIONS.items()}
    print(shtab.complete(parser, shell, preamble=functions))
