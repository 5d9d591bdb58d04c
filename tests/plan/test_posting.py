"""Receives that are posted one action early, and the hosts that wait for their devices meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product

import pytest

import megapipe
from megapipe.plan import KINDS, Action, Plan, make_plan
from megapipe.plan.kinds import is_overlapped

SCHEDULES = [name for name in megapipe.schedule_names() if name != "no_pipelining"]
MAY_HANG = {"looped_bfs", "interleaved_zb1p", "zbv"}
"""Where sends wait for their receives, and hosts for their devices, whatever is posted early."""


def launches(plan: Plan, rank: int) -> list[list[Action]]:
    """The actions of a rank, an overlapped pair in one."""
    grouped: list[list[Action]] = []
    is_second = False
    for event in plan.events[rank]:
        if event.action is not None:
            grouped[-1:] = [[*grouped[-1], event.action]] if is_second else [*grouped[-1:], [event.action]]
            is_second = is_overlapped(event.verb) and not is_second
    return grouped


def source(plan: Plan, action: Action) -> Action | None:
    """The action of another rank whose message this one waits for."""
    kind = KINDS[action.kind]
    stage = action.stage + (-1 if kind.is_forward else 1)
    if kind.message is None or not plan.has_stage(stage) or plan.rank_of(stage) == plan.rank_of(action.stage):
        return None
    return action._replace(stage=stage, kind="F" if kind.is_forward else "B")


def check(plan: Plan, posted_ahead: list[dict[Action, list[Action]]], sends_wait: bool) -> None:
    """Raises CycleError where ranks would wait for each other: each launch waits for all that is on its device."""
    rows = [launches(plan, rank) for rank in range(plan.pp_size)]
    at = {
        as_source(a): (rank, place) for rank, row in enumerate(rows) for place, launch in enumerate(row) for a in launch
    }
    after = {place: {(place[0], place[1] - 1)} if place[1] else set() for place in at.values()}
    messages: dict[tuple[int, int], list[tuple[int, int]]] = {}  # by sender and receiver: when sent, when posted
    for rank, row in enumerate(rows):
        early = {a for behind in posted_ahead[rank].values() for a in behind}
        for place, action in [(place, a) for place, launch in enumerate(row) for a in launch]:
            if (sender := source(plan, action)) is not None:
                posted_at, (peer, sent_at) = place - (action in early), at[sender]
                after[rank, posted_at].add((peer, sent_at))
                messages.setdefault((peer, rank), []).append((sent_at, posted_at))
    for (peer, rank), in_order in messages.items() if sends_wait else ():
        posted_at = len(rows[rank])
        for sent_at, own in sorted(in_order, reverse=True):  # posted together with those behind it, at the latest
            posted_at = min(posted_at, own)
            if sent_at + 1 < len(rows[peer]) and posted_at:
                after[peer, sent_at + 1].add((rank, posted_at - 1))
    TopologicalSorter(after).prepare()


def as_source(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "BW" else action


def plans() -> Iterator[Plan]:
    for name, pp_size, rounds in product(SCHEDULES, (2, 3, 4, 8), (1, 2, 4)):
        yield make_plan(name, pp_size, rounds * pp_size)


def test_no_rank_waits_for_ever() -> None:
    """By another way than they were chosen: as a graph without a cycle, over every schedule and many sizes."""
    for plan in plans():
        for rank, posted in enumerate(plan.posted_ahead):
            grouped = launches(plan, rank)
            behind = {first[-1]: second for first, second in pairwise(grouped)}
            for action, actions in posted.items():
                assert {*actions} <= {a for a in behind[action] if source(plan, a)}, (plan.name, rank, action)
        check(plan, plan.posted_ahead, sends_wait=plan.name not in MAY_HANG)


def test_both_neighbours_early_would_wait_for_ever() -> None:
    """1F1B with all receives posted early, which was so once. Half of them may be."""
    plan = make_plan("1f1b", 4, 8)
    every = [{first: [second] for first, second in pairwise(row) if source(plan, second)} for row in plan.actions]
    with pytest.raises(CycleError):
        check(plan, every, sends_wait=False)
    early = [action for posted in plan.posted_ahead for behind in posted.values() for action in behind]
    assert plan.num_messages / 4 < len(early) < plan.num_messages / 2 + 4


@pytest.mark.parametrize("name", ["zb1p", "zb2p", "interleaved_1f1b", "v_half", "zbv"])
def test_most_messages_travel_early(name: str) -> None:
    plan = make_plan(name, 4, 16)
    early = sum(len(behind) for posted in plan.posted_ahead for behind in posted.values())
    assert early > 0.85 * plan.num_messages, early
