"""The order that a schedule of torch's holds, as a plan."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ...plan import Plan, load_plan


def order_of(schedule: Any) -> Any:
    """Per rank, the actions of one of torch's schedules, as torch runs them. Raises ValueError where there are none."""
    order = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
    if not order:
        raise ValueError(f"{type(schedule).__name__} has no order to run: call _load_csv, or set pipeline_order.")
    return order


def plan_of(order: Any, name: str) -> Plan:
    """The plan of such an order, by the text of its actions. Raises as `load_plan` does."""
    rows = [" ".join(str(action) for action in order[rank] if action is not None) for rank in sorted(order)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.txt")
        path.write_text("\n".join(rows))
        return load_plan(path)
