"""Receives that are posted one action early, and the hosts that wait for their devices meanwhile."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise, product
from typing import Any

import pytest

import megapipe
from megapipe.plan import KINDS, Action, Plan, make_plan
from megapipe.plan.kinds import is_overlapped

SCHEDULES = [name for name in megapipe.schedule_names() if name != "no_pipelining"]
LAUNCHED = 4


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
    if kind.direction is None or not plan.has_stage(stage) or plan.rank_of(stage) == plan.rank_of(action.stage):
        return None
    return action._replace(stage=stage, kind="F" if kind.is_forward else "B")


def ends(plan: Plan, posted_ahead: list[dict[Action, list[Action]]], waiting: Iterable[int], sends_wait: bool) -> bool:
    """Whether all ranks come to their ends where the hosts of some wait for their devices: in each launch, and behind
    each post of a receive, where memory is taken for the next one. By another way than receives are chosen to be
    early: as a graph without a cycle, of points of hosts, launches on devices and messages."""
    rows = [launches(plan, rank) for rank in range(plan.pp_size)]
    at = {
        as_source(a): (rank, place) for rank, row in enumerate(rows) for place, launch in enumerate(row) for a in launch
    }
    # A host launches, then it is in the launch; before, it posts for the first and the second of a pair, and early.
    points = {rank: [*product(range(len(row)), (0, 1, 2, 3, LAUNCHED, LAUNCHED + 1))] for rank, row in enumerate(rows)}
    after: dict[tuple[Any, ...], set[tuple[Any, ...]]] = {}
    for rank, of_rank in points.items():
        for place in range(len(rows[rank])):
            after["device", rank, place] = {("host", rank, (place, LAUNCHED)), ("device", rank, place - 1)}
        after |= {("host", rank, one): {("host", rank, before)} for before, one in pairwise([(-1, 0), *of_rank])}
    messages: dict[tuple[int, int], list[list[Any]]] = {}  # by sender and receiver: where it is sent, and posted
    for rank, row in enumerate(rows):
        early = {a for behind in posted_ahead[rank].values() for a in behind}
        for place, number, action in [(p, n, a) for p, launch in enumerate(row) for n, a in enumerate(launch)]:
            if (sender := source(plan, action)) is not None:
                peer, sent_at = at[sender]
                posted_at = (place - 1, 2 + number) if action in early else (place, number)
                messages.setdefault((peer, rank), []).append([sent_at, place, posted_at])
    sent, posted = {}, {}
    for edge, in_order in messages.items():
        in_order.sort()
        for one, behind in zip(in_order[-2::-1], in_order[:0:-1]):
            one[2] = min(one[2], behind[2])  # posted together, at the latest
        for number, (sent_at, place, posted_at) in enumerate(in_order):
            needs = {("device", edge[0], sent_at), ("host", edge[1], posted_at), (*edge, number - 1)}
            after[(*edge, number)] = needs
            after["device", edge[1], place].add((*edge, number))
        sent[edge], _, posted[edge] = zip(*in_order)
    for rank in waiting:
        mine = [edge for edge in messages if edge[1] == rank]
        posts = {posted_at for edge in mine for posted_at in posted[edge]}
        for point, following in pairwise([*points[rank], None]):
            if point in posts or point[1] == LAUNCHED + 1:
                done = {("device", rank, point[0] - (point[1] < LAUNCHED))}
                done |= {(*edge, bisect_right(posted[edge], point) - 1) for edge in mine}
                if sends_wait:
                    done |= {(*edge, bisect_left(sent[edge], point[0]) - 1) for edge in messages if edge[0] == rank}
                after.setdefault(("host", rank, following), set()).update(done)
    try:
        TopologicalSorter(after).prepare()
    except CycleError:
        return False
    return True


def as_source(action: Action) -> Action:
    return action._replace(kind="B") if action.kind == "BW" else action


def plans() -> Iterator[Plan]:
    for name, pp_size, rounds in product(SCHEDULES, (2, 3), (1, 3)):
        yield make_plan(name, pp_size, rounds * pp_size)


def test_no_rank_waits_for_ever() -> None:
    """Over every schedule and many sizes."""
    for plan in plans():
        for rank, posted in enumerate(plan.posted_ahead):
            grouped = launches(plan, rank)
            behind = {first[-1]: second for first, second in pairwise(grouped)}
            for action, actions in posted.items():
                assert {*actions} <= {a for a in behind[action] if source(plan, a)}, (plan.name, rank, action)
        assert ends(plan, plan.posted_ahead, range(plan.pp_size), sends_wait=plan.name not in MAY_HANG), plan.name


MAY_HANG = {"looped_bfs", "interleaved_zb1p", "zbv", "combined_zb1p"}
"""Where sends wait for their receives, and hosts for their devices, whatever is posted early."""
WHEN_NEEDED = {"zb2p", "dualpipev", "interleaved_1f1b", "seq_interleaved_1f1b", "combined_1f1b"}
"""And these, where nothing is posted early."""


@pytest.mark.parametrize("name", SCHEDULES)
def test_where_messages_are_large_and_memory_is_short(name: str) -> None:
    """The table of docs/gpus.md. Receives' own memory was taken in front of them, where two neighbours that were short
    of memory waited for ever under 1F1B, too: each for the send that the other was about to receive."""
    plan = make_plan(name, 4, 12)
    of_two = [{rank, rank + 1} for rank in range(3)]
    for posted_ahead, hang_by_two, hang_by_all in (
        (plan.posted_ahead, {"zbv", "combined_zb1p"}, MAY_HANG),
        ([{}] * 4, {"zbv", "combined_zb1p", "zb2p", "interleaved_zb1p", "dualpipev"}, MAY_HANG | WHEN_NEEDED),
    ):
        assert ends(plan, posted_ahead, range(4), sends_wait=True) == (name not in hang_by_all)
        if name in hang_by_all:  # where fewer hosts wait, no more hangs
            assert all(ends(plan, posted_ahead, pair, sends_wait=True) for pair in of_two) == (name not in hang_by_two)
            assert all(ends(plan, posted_ahead, {rank}, sends_wait=True) for rank in range(4))


def test_both_neighbours_early_would_wait_for_ever() -> None:
    """1F1B with all receives posted early, which was so once. Half of them may be."""
    plan = make_plan("1f1b", 4, 8)
    every = [{first: [second] for first, second in pairwise(row) if source(plan, second)} for row in plan.actions]
    assert not ends(plan, every, range(4), sends_wait=False)
    early = [action for posted in plan.posted_ahead for behind in posted.values() for action in behind]
    assert plan.num_messages / 4 < len(early) < plan.num_messages / 2 + 4


@pytest.mark.parametrize("name", ["zb1p", "zb2p", "interleaved_1f1b", "v_half", "zbv"])
def test_most_messages_travel_early(name: str) -> None:
    plan = make_plan(name, 4, 16)
    early = sum(len(behind) for posted in plan.posted_ahead for behind in posted.values())
    assert early > 0.85 * plan.num_messages, early
