"""Simulates how computation hides communication within stages, such as exchanges of experts.

In an overlapped pair each computes while the other's data is on its way, and both end together. A forward or a backward
that has no partner runs the products of pending Ws meanwhile. A backward's own Ws come last: while the exchanges of its
layers but the last are under way, half of them on average, some are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from .kinds import KINDS, WEIGHTS
from .verbs import Action


def hide(
    actions: Sequence[Action],
    pairs: Mapping[int, int],
    durations: Sequence[float],
    exchange: Callable[[Action], float],
    weights: Callable[[Action], float],
) -> tuple[list[float], list[float]]:
    """
    Args:
        actions, pairs, durations: of one rank.
        exchange: the time of an action that others may hide, if it has a message; part of its duration.
        weights: the time of the Ws of an action that completes the gradients of weights; part of its duration.

    Returns:
        What is left of the durations, and how long before an action's end what it makes has left: while the Ws of a
        backward run.
    """
    left, tails = list(durations), [0.0] * len(durations)
    in_pairs = {index for pair in pairs.items() for index in pair}
    deferred = {_unit(action): index for index, action in enumerate(actions) if action.kind == WEIGHTS.name}
    pending: list[int] = []
    for index, action in enumerate(actions):
        kind = KINDS[action.kind]
        if kind.direction is None:
            if kind.completes_weights:
                pending.remove(index)
            continue
        if kind.completes_weights:
            tails[index] = weights(action)
            if index not in in_pairs:
                hidden = min(exchange(action) / 2, tails[index])
                left[index] -= hidden
                tails[index] -= hidden
            continue
        window = 0.0 if index in in_pairs else exchange(action)
        own = [] if kind.is_forward or _unit(action) not in deferred else [deferred[_unit(action)]]
        for several, most in ((pending, window), (own, window / 2)):
            for one in several:
                part = min(left[one], window, most)
                left[one] -= part
                window -= part
        pending += own
    for pair in pairs.items():
        waits = [exchange(actions[index]) for index in pair]
        first, second = (durations[index] - wait - tails[index] for index, wait in zip(pair, waits))
        whole = durations[pair[0]] + durations[pair[1]]
        hidden = min(waits[0], second) + min(waits[1], first)
        for index in pair:  # the two cannot be told apart: both shrink by the same
            left[index] *= 1 - hidden / (whole or 1.0)
    return left, tails


def _unit(action: Action) -> tuple[int, int, int]:
    return action.stage, action.microbatch, action.slice
