"""Whether a schedule is the one that it is to be, action by action, and if not, in which respect it is another one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile, zip_longest

from ..plan import KINDS, WEIGHTS, Action, AnySchedule, Costs, Plan, Schedule, find_schedule, simulate
from .sizes import Size, Sizes, plan_of_size

UP_TO = (4, 8)
"""Ranks and microbatches up to which the two are compared, with these first: they show a difference best."""


def unlike(name: AnySchedule, like: AnySchedule, sizes: Sizes) -> str:
    """A sentence on a size at which a schedule is another one than `like`; "" where it is the same at all that are
    compared.

    Args:
        sizes: those at which it is right.
    """
    own, other = find_schedule(name), find_schedule(like)
    if own.num_chunks is not None and other.num_chunks is not None and own.num_chunks != other.num_chunks:
        return f"{own.name} has {own.num_chunks} chunks on each rank, and {other.name} {other.num_chunks}."
    for size in sorted(sizes.right, key=lambda size: (size[:2] != UP_TO, size)):
        if size.num_slices == 1 and size.pp_size <= UP_TO[0] and size.num_microbatches <= UP_TO[1]:
            mine, wanted = _plan(own, size), _plan(other, size)
            if mine is not None and wanted is not None and (text := _difference(mine, wanted)):
                return f"with {size} it is not {other.name}: {text}"
    return ""


def _plan(schedule: Schedule, size: Size) -> Plan | None:
    try:
        return plan_of_size(schedule, size)
    except ValueError:
        return None


def _difference(plan: Plan, like: Plan) -> str:
    held = [[plan.rank_of(stage) for stage in range(plan.pp_size * plan.num_chunks)] for plan in (plan, like)]
    if held[0] != held[1]:
        return f"its stages are on ranks {_listed(held[0])}, and there on {_listed(held[1])}: choose another placement."
    splits = [any(action.kind == WEIGHTS.name for row in one.actions for action in row) for one in (plan, like)]
    if splits[0] != splits[1]:
        return "its backwards are " + (
            "split into B and W, and there they are whole: say BW."
            if splits[0]
            else "whole (BW), and there they are split: say B and W."
        )
    for rank, (own, others) in enumerate(zip(plan.actions, like.actions)):
        if own != others:
            return f"{_of_rank(rank, own, others)}. {_effect(plan, like)}"
    return ""


def _of_rank(rank: int, own: Sequence[Action], others: Sequence[Action]) -> str:
    mine, wanted = (len(list(takewhile(lambda action: action.kind == "F", row))) for row in (own, others))
    index = next(k for k, pair in enumerate(zip_longest(own, others)) if pair[0] != pair[1])
    one, other = own[index] if index < len(own) else None, others[index] if index < len(others) else None
    if mine != wanted:
        return f"rank {rank} runs {mine} forwards before its first backward, and there {wanted}"
    place = f"behind {own[index - 1]}" if index else "at first"
    text = f"rank {rank} runs {one} {place}, and there {other}"
    if one is not None and other is not None and one.kind == other.kind and one.stage != other.stage:
        text += f": it turns to stage {one.stage} {'too early' if KINDS[one.kind].is_forward else 'before the other'}"
    elif one is not None and one.kind == WEIGHTS.name:
        text += ": the weight gradient comes too early"
    elif other is not None and other.kind == WEIGHTS.name:
        text += ": the weight gradient comes too late"
    return text


def _effect(plan: Plan, like: Plan) -> str:
    """What that does to the step and to the memory."""
    own, other = simulate(plan, Costs()), simulate(like, Costs())
    held, least = max(own.peak_activations), max(other.peak_activations)
    parts = []
    if abs(own.makespan - other.makespan) > 1e-9 * other.makespan:
        parts.append(f"its step takes {own.makespan:.4g}, and there {other.makespan:.4g}")
    if held != least:
        parts.append(f"it holds {held:.3g} microbatches at once, and there {least:.3g}")
    return (", ".join(parts)).capitalize() + "." if parts else "Step and memory are the same."


def _listed(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
