"""The clocks of several hosts, brought into line by the messages of the very steps that are to be compared.

A message cannot be used before it was sent. So each one says how far, at least, its receiver's clock is ahead of its
sender's; messages the other way say how far at most. Of all messages between two clocks the fastest ones count, as in
the network time protocol: half way between the two bounds the error is at most half the difference of their
latencies. That needs no exchange of its own, no quiet network, and no clock that keeps its rate from a calibration at
the start of a run until now. Every pipeline that trains sends messages both ways; where all go one way, the fastest is
taken to have needed no time.

Ranks on one host share a clock: nothing is moved there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..plan import Plan, RankStep
from .timeline import measured_messages

__all__ = ["align"]


def align(plan: Plan, steps: Sequence[Sequence[RankStep]], clocks: Sequence[str]) -> list[list[RankStep]]:
    """The steps on the clock of rank 0.

    Args:
        steps: per step and rank, in milliseconds of the rank's own clock.
        clocks: the name of each rank's clock; ranks with the same name share one.
    """
    ahead = _bounds(plan, steps, clocks)
    offsets = {clocks[0]: 0.0}
    while len(offsets) < len(set(clocks)):
        # From what is known to the clock whose bounds are closest to each other.
        pairs = [(known, new) for known, new in ahead if known in offsets and new not in offsets]
        known, new = min(pairs, key=lambda pair: -ahead[pair] - ahead[pair[::-1]])
        least, most = ahead[known, new], -ahead[new, known]
        bounds = [bound for bound in (least, most) if math.isfinite(bound)]
        offsets[new] = offsets[known] + sum(bounds) / len(bounds)
    return [[rank.moved(offsets[clock]) for rank, clock in zip(step, clocks)] for step in steps]


def _bounds(plan: Plan, steps: Sequence[Sequence[RankStep]], clocks: Sequence[str]) -> dict[tuple[str, str], float]:
    """How much, for each pair of clocks that exchange messages, at least is to be added to the second one's times for
    no message to arrive before it was sent, if nothing is added to the first one's; -inf where none say so."""
    ahead: dict[tuple[str, str], float] = {}
    for step in steps:
        for message in measured_messages(plan, step):
            pair = clocks[message.sender], clocks[message.receiver]
            if pair[0] != pair[1]:
                ahead.setdefault(pair[::-1], -math.inf)
                ahead[pair] = max(ahead.get(pair, -math.inf), message.sent - message.received)
    return ahead
