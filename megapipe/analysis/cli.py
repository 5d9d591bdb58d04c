"""The command `megapipe`: look at schedules, and compare them, before they run and after."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import megapipe

from .. import schedules as schedules  # registers them
from ..plan import nearest
from .compare_command import compare, tune
from .fit_command import fit_command
from .progress import telling
from .prove_command import prove_command
from .show_command import show
from .status_command import status
from .text import is_closed


def _number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, got {text}")
    return int(text)


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


NUMBER: dict[str, Any] = {"type": _number, "metavar": "N"}
WEIGHTS: dict[str, Any] = {"type": int, "metavar": "N"}
TIME: dict[str, Any] = {"type": float, "metavar": "T"}
SIZE: dict[str, Any] = {"metavar": "SIZE"}
FLAG: dict[str, Any] = {"action": "store_true"}

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    # What is looked at
    "schedule": ("a schedule's name, FILE.py:NAME, a file of a plan (.csv, .json, .txt), or a measured timeline", {}),
    "own": ("FILE.py:NAME, a schedule of your own to look at too", {"nargs": "*", "metavar": "FILE.py:NAME"}),
    "timeline": ("the file that was recorded", {}),
    "model": ("a config.json of Hugging Face, or its numbers, such as hidden_size=4096", {"nargs": "*"}),
    "address": (
        "HOST:PORT of the job's store; default: MASTER_ADDR and MASTER_PORT, or the ranks here",
        {"nargs": "?"},
    ),
    # Sizes
    "--pp": ("pipeline ranks", NUMBER),
    "--tp": ("tensor-parallel ranks", NUMBER),
    "--ep": ("ranks that share out experts", NUMBER),
    "--vp": ("chunks of a rank", NUMBER),
    "--microbatch": ("sequences of one", NUMBER),
    "--microbatches": ("microbatches per step", NUMBER),
    "--chunks": ("stages per rank, for schedules that leave it open; tune tries 2 and 4", {**NUMBER, "nargs": "+"}),
    "--slices": ("slices per sequence, for schedules that cut them", {**NUMBER, "nargs": "+"}),
    "--like": ("the schedule that it is to be, action by action: a name, or a file of a plan", {"metavar": "SCHEDULE"}),
    # Settings of the config
    "--min-pending-weights": ("Ws that stay pending until the last B is done, for the windows of --exchange", WEIGHTS),
    "--recompute": (
        "activations are computed again before each B (R), in time T, or that of F without it; at most one W is "
        "pending then",
        {**TIME, "nargs": "?", "const": math.nan},
    ),
    "--offload": (
        "activations go to host memory where they are back in time (O, L), and a copy takes T times as long as their "
        "F; at most one W is pending then",
        TIME,
    ),
    # Times
    "--times": (
        "of one microbatch on a whole rank, in any unit; default: 1 1 1",
        {"type": float, "nargs": 3, "metavar": ("F", "B", "W"), "default": [1.0, 1.0, 1.0]},
    ),
    "--p2p": ("latency of a message; default: 0", {**TIME, "default": 0.0}),
    "--exchange": (
        "the part of F, and of B, that is communication within stages, and that pairs and Ws hide; default: 0",
        {**TIME, "default": 0.0},
    ),
    "--unsplit": ("for layers that do not defer their weight gradients: B takes W's time too, W none", FLAG),
    "--speeds": ("how fast each rank or device is, such as 1,1,.5,.5", {"type": _list, "metavar": "S,S,..."}),
    # Memory
    "--bytes": ("those of each stage, as StageBytes.save wrote them", {"metavar": "FILE"}),
    "--memory-limit": (
        "microbatches that a rank has memory for at once, or, with --bytes, a size such as 80GB; one for all ranks, or "
        "one for each, such as 24GB,24GB,12GB,8GB",
        {"type": _list, "metavar": "N"},
    ),
    # Output
    "--all": ("show the schedules too that others beat", FLAG),
    "--width": ("columns of the timeline; default: the terminal's", NUMBER),
    "--save": (
        "write what the ending asks for. show: .csv or .json (the plan), .svg or .png (a picture), .trace.json (for "
        "Perfetto); compare: .csv or .json (the table); tune: .csv or .json (the recommended plan, its Ws placed by "
        "the measured times); prove: .md (the page), .svg or .png (the picture), .json",
        {"nargs": "+", "metavar": "FILE", "default": []},
    ),
    # The job of fit
    "--devices": ("how many", NUMBER),
    "--sequence": ("tokens of one", NUMBER),
    "--batch": ("sequences of a step", NUMBER),
    "--memory": ("of a device, such as 80GB, or of each, such as 24GB,24GB,12GB,8GB", {"type": _list, **SIZE}),
    "--flops": ("operations a second of a device", {"type": float, "metavar": "F"}),
    "--efficiency": ("the share that your stages reach of them", {"type": float, "metavar": "E"}),
    "--expert-efficiency": (
        "the share of --flops that routed experts reach; default: that of --efficiency",
        {"type": float, "metavar": "E", "default": 0.0},
    ),
    "--fp8-flops": (
        "operations a second of a device in 8 bits, for products outside routed experts; default: all are in 16",
        {"type": float, "metavar": "F", "default": 0.0},
    ),
    "--node": ("devices of a node; default: 8", {**NUMBER, "default": 8}),
    "--node-bandwidth": ("bytes a second of a device in its node, one way", SIZE),
    "--bandwidth": ("the same between nodes", SIZE),
    "--host-bandwidth": ("the same between a device and its host; none: activations are not moved there", SIZE),
    "--cp": ("devices that share a sequence; default: 1", {**NUMBER, "default": 1}),
    "--reserve": ("share of the memory kept free; default: 0.1", {"type": float, "default": 0.1, "metavar": "R"}),
    "--top": ("how many are shown; default: 10", {**NUMBER, "default": 10}),
}


class Command(NamedTuple):
    run: Callable[[argparse.Namespace], int | None]
    """Returns the exit status; None for 0."""
    help: str
    options: str
    """The names of its options, those before / are needed."""


PLAN = "--chunks --slices --min-pending-weights --recompute --offload --unsplit"
CHOICE = "own --bytes --memory-limit --all --save"
COMMANDS = {
    "show": Command(
        show,
        "draw one schedule, or a measured step above its plan",
        f"schedule / --pp --microbatches {PLAN} --times --p2p --exchange --speeds --bytes --width --save",
    ),
    "compare": Command(
        compare,
        "all schedules in one table, fastest first",
        f"--pp --microbatches / {PLAN} --times --p2p --exchange --speeds {CHOICE}",
    ),
    "prove": Command(
        prove_command,
        "whether a schedule is right: every size on paper, some on processes of this machine, and in torch's runtime",
        "schedule / --chunks --like --save",
    ),
    "tune": Command(
        tune,
        "predict all schedules' steps from a measured timeline, and recommend one",
        f"timeline / --microbatches {PLAN} {CHOICE}",
    ),
    "fit": Command(
        fit_command,
        "which ways of training a model fit, fastest first: by formulas and plans, not measured",
        "--devices --sequence --batch --memory --flops --efficiency / model --pp --tp --vp --ep --cp --microbatch "
        "--expert-efficiency --fp8-flops --node --node-bandwidth --bandwidth --host-bandwidth --speeds --reserve --top "
        "--unsplit",
    ),
    "status": Command(status, "where every rank of a running job is, also while it hangs", "/ address"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: without the command's name; None takes those of the process.

    Returns:
        Its exit status: 1 where `prove` has found something wrong; 2 for wrong arguments, after one sentence about what
        is wrong; 1, too, where its output is not read
        to the end, as in `megapipe compare ... | head` or `>&-`; 130 where it was interrupted.
    """
    parser, name, status = _parser(), "", 0
    try:
        args = unknown = None
        with suppress(SystemExit):  # argparse has printed the help or the version
            args, unknown = parser.parse_known_args(arguments)
        if args is not None:
            name = f" {args.command}" if args.command else ""
            if unknown:
                raise ValueError(_unknown(unknown[0], COMMANDS[args.command].options if name else "--help --version"))
            if name:
                with telling(f"megapipe{name}"):
                    status = COMMANDS[args.command].run(args) or 0
            else:
                parser.print_help()
        if is_closed():
            return 1
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python says so when it ends
        return 1
    except KeyboardInterrupt:
        return 130
    except FileNotFoundError as error:
        print(f"megapipe{name}: there is no file or folder {error.filename}.", file=sys.stderr)
    except (ValueError, OSError) as error:
        print(f"megapipe{name}: {error}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    """One that says in a sentence what is wrong, and takes no abbreviations."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (megapipe{self.prog.removeprefix('megapipe')} --help lists what there is).")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="megapipe", description="Look at schedules, before they run and after.")
    parser.add_argument("--version", action="version", version=f"megapipe {megapipe.__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for known, command in COMMANDS.items():
        _add_options(commands.add_parser(known, help=command.help, description=command.help), command.options)
    return parser


def _add_options(parser: argparse.ArgumentParser, names: str) -> None:
    needed, _, others = names.partition("/")
    for name in (*needed.split(), *others.split()):
        text, settings = OPTIONS[name]
        required: dict[str, Any] = {"required": True} if name.startswith("--") and name in needed.split() else {}
        parser.add_argument(name, help=text, **settings, **required)


def _unknown(option: str, names: str) -> str:
    known = [name for name in names.split() if name.startswith("--")]
    meant = nearest(option.partition("=")[0], {name: name for name in known})
    return f"there is no option {option}" + (f": do you mean {meant}?" if meant else f"; choose of {', '.join(known)}.")
