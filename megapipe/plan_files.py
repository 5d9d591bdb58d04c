"""Plans read from files: ours, and those of torch.distributed.pipelining. `Plan` writes them."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path

from .plan import Plan, plan_of
from .verbs import Action

__all__ = ["load_plan"]


def load_plan(path: str | Path) -> Plan:
    """A plan from a file that `save_csv` or `save_json` wrote, or that torch.distributed.pipelining did.

    Overlapped pairs are in no file: they come back as a forward and a backward.

    Raises ValueError where the file does not hold a plan. Whether the plan works is for its `check` to say.
    """
    text = Path(path).read_text()
    name = Path(path).stem
    if text.lstrip().startswith("{"):
        content = json.loads(text)
        if not {"name", "actions"} <= content.keys():
            raise ValueError(f"{path} holds no plan: it lacks a name or actions.")
        name, rows = str(content["name"]), content["actions"]
    else:
        rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(text.splitlines())]
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows) or not any(rows):
        raise ValueError(f"{path} holds no plan: it has no row of actions, like 2F0, for any rank.")
    return plan_of(name, [_parse_row(row) for row in rows if row])


def _parse_row(cells: Sequence[object]) -> list[Action]:
    """A backward is a whole one unless there is a W for it."""
    row = [_parse_action(cell) for cell in cells]
    put_off = {action._replace(kind="BW") for action in row if action.kind == "W"}
    return [action._replace(kind="B") if action in put_off else action for action in row]


def _parse_action(cell: object) -> Action:
    for letter, kind in (("F", "F"), ("B", "BW"), ("I", "BW"), ("W", "W")):
        stage, found, microbatch = str(cell).partition(letter)
        if found and stage.isdigit() and microbatch.isdigit():
            return Action(int(stage), kind, int(microbatch))
    raise ValueError(f"{cell!r} is not an action like 2F0, 2B0 or 2W0.")
