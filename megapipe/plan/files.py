"""Plans read from files: ours, and those of torch.distributed.pipelining. `Plan` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .kinds import KINDS
from .memory import StageBytes
from .plan import Plan, plan_of
from .verbs import Action


def read_text(path: str | Path) -> str:
    """The text of a file, without the byte order mark that some editors begin it with.

    Raises:
        ValueError: it is no UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text: {error}.") from None


def parse_json(path: str | Path, text: str) -> Any:
    """The content of a JSON file.

    Args:
        path: named in errors.
        text: that of the file.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON that can be read: {error}.") from None


def load_plan(path: str | Path) -> Plan:
    """A plan from a file: JSON that `save_json` wrote, CSV of `save_csv` or of torch.distributed.pipelining
    (`_dump_csv`), or text with a line for each rank, such as `0F0 0F1 0B0 0W0 0B1`.

    The placement is the one that the actions tell. Sends, receives and collectives of torch's plans are left out: each
    result is sent as soon as it is there.

    Raises:
        ValueError: the file does not hold a plan. Whether the plan works is for its `check` to say.
    """
    text = read_text(path)
    if not text.lstrip().startswith("{"):
        rows = [line.replace(",", " ").split() for line in text.splitlines()]
        return plan_of(Path(path).stem, *_parse_rows(path, rows))
    content = parse_json(path, text)
    if not {"name", "actions"} <= content.keys():
        raise ValueError(f"{path} holds no plan: it lacks a name or actions.")
    plan = plan_of(str(content["name"]), *_parse_rows(path, content["actions"]))
    said = {**plan.sizes, **{size: content[size] for size in plan.sizes if size in content}}
    if said != plan.sizes:
        raise ValueError(
            f"{path} says that it has {said}, but its actions have {plan.sizes}: it is not as it was saved."
        )
    return replace(plan, placement=replace(plan.placement, name=str(content.get("placement", plan.placement.name))))


def load_stage_bytes(path: str | Path) -> StageBytes:
    """Read what `StageBytes.save` wrote.

    Raises:
        ValueError: the file holds something else.
    """
    content = parse_json(path, read_text(path))
    try:
        return StageBytes(**content["bytes"])
    except (LookupError, TypeError):
        raise ValueError(f"{path} does not hold the bytes of stages: write them by StageBytes.save.") from None


def _parse_rows(path: str | Path, rows: Any) -> tuple[list[list[Action]], list[list[int]]]:
    """The actions of each rank, and the places in them of the first actions of overlapped pairs."""
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows) or not any(rows):
        raise ValueError(f"{path} holds no plan: it has no row of actions, like 2F0, for any rank.")
    actions, pairs = zip(*(_parse_row(row) for row in rows if row))
    if not any(actions):
        raise ValueError(f"{path} holds no plan: none of its cells is an action, like 2F0.")
    return list(actions), list(pairs)


def _parse_row(cells: Sequence[object]) -> tuple[list[Action], list[int]]:
    row: list[Action] = []
    pairs = []
    for cell in map(str, cells):
        if pair := _PAIR.fullmatch(cell):
            pairs.append(len(row))
            row += map(_parse_action, pair.groups())
        elif not _TORCHS_OWN.fullmatch(cell):
            row.append(_parse_action(cell))
    # A backward is a whole one unless there is a W for it.
    deferred = {action._replace(kind="BW") for action in row if action.kind == "W"}
    row = [action._replace(kind="B") if action in deferred else action for action in row]
    return row, pairs


def _parse_action(cell: str) -> Action:
    match = re.fullmatch(r"([0-9]{1,9})([A-Z]{1,2})([0-9]{1,9})(?:\.([0-9]{1,9}))?", cell)
    kind = _BACKWARD.get(match[2], match[2]) if match is not None else ""
    if match is None or kind not in KINDS:
        raise ValueError(f"{cell[:40]!r} is not an action like 2F0, 2B0 or 2W0 (2F0.1 for a slice).")
    return Action(int(match[1]), kind, int(match[3]), int(match[4] or 0))


_BACKWARD = {"B": "BW", "I": "BW"}
"""Until it is known which have a W."""
_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")
_TORCHS_OWN = re.compile(r"[0-9]+(?:(?:WAIT_)?(?:(?:SEND|RECV)_[FB]|REDUCE_GRAD)|UNSHARD|RESHARD)[0-9]*")
