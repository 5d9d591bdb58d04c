"""What the idle time of a measured timeline was for: the bubble, split into its causes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from ..plan import Costs, Plan, play, simulate
from ..runtime import RankStep
from .timeline import Timeline, first_start, step_time

__all__ = ["BubbleSplit", "split_bubble"]


@dataclass(frozen=True)
class BubbleSplit:
    """Where the time went in which ranks computed nothing: milliseconds per step, one entry per rank.

    A rank's bubble is the length of the step, from the first rank's beginning to the last one's end, less the time in
    which the rank computes. It is divided by playing the plan again and again, each time with one more of the things
    that were measured, until all are in. What a thing adds is put down to it, so the four add up to the bubble exactly:

    - `own`: every action takes the mean time of its kind over all stages. What is left idle is the schedule's own.
    - `uneven`: every action takes what it took. Stages, or microbatches, that take longer make the others wait.
    - `host`: ranks begin when they began, and spend between actions what they spent outside actions and waits.
    - `communication`: the step as it was measured. All that the last play lacks are the delays of messages.

    A rank that begins before the first action, while others are still in the step before, only waits; one that begins
    late is the host's. Messages take no time in the plays. Time that holds nobody up, like a pause of the host on a
    rank that would have had to wait anyway, is in none of them. Only `uneven` can be negative: on ranks with more to do
    than others.
    """

    step_time: float
    own: list[float]
    uneven: list[float]
    host: list[float]
    communication: list[float]

    @property
    def shares(self) -> dict[str, float]:
        """The mean over the ranks, as shares of the step's time."""
        parts = {
            "the schedule's own": self.own,
            "uneven stages": self.uneven,
            "waiting for communication": self.communication,
            "host": self.host,
        }
        return {name: fmean(times) / self.step_time for name, times in parts.items()}

    def __str__(self) -> str:
        shares = self.shares
        parts = " + ".join(f"{share:.1%} {name}" for name, share in shares.items())
        return f"{sum(shares.values()):.1%} = {parts}"


def split_bubble(timeline: Timeline) -> BubbleSplit:
    """The mean over the steps."""
    plan, steps = timeline.plan, timeline.steps
    even_costs = timeline.even_costs()
    even_costs.p2p = 0.0
    even = simulate(plan, even_costs)
    own = [share * even.makespan for share in even.bubble]
    busy = [fmean(step[rank].busy for step in steps) for rank in range(plan.pp_size)]
    played = fmean(_play(plan, step, with_host=False) for step in steps)
    with_host = fmean(_play(plan, step, with_host=True) for step in steps)
    measured = fmean(map(step_time, steps))
    return BubbleSplit(
        step_time=measured,
        own=own,
        uneven=[played - time - before for time, before in zip(busy, own)],
        host=[with_host - played] * plan.pp_size,
        communication=[measured - with_host] * plan.pp_size,
    )


def _play(plan: Plan, step: Sequence[RankStep], with_host: bool) -> float:
    """How long the step takes when messages take no time: as measured otherwise, or without what the host does."""
    durations = {action: end - start for rank in step for action, start, end in rank.spans}
    clocks = [0.0] * plan.pp_size
    pauses = dict.fromkeys(durations, 0.0)
    if with_host:
        clocks = [rank.begin - first_start(step) for rank in step]
        pauses = {action: pause for rank in step for action, pause in rank.pauses().items()}
    play(plan, durations.__getitem__, Costs(), clocks, [[] for _ in step], pauses.__getitem__)
    return max(clocks)
