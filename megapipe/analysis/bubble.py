"""Where the idle time of a measured timeline comes from: the bubble, split into its causes."""

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
    """The time in which ranks computed nothing, split into four causes.

    A rank's bubble is the length of the step, from the start of the first action of all ranks to the end of the last
    one, less the time in which the rank computes. The plan is simulated several times, each time with one more measured
    effect. What an effect adds is put down to it, so the four add up to the bubble exactly. Messages take no time in
    the simulations.

    Attributes:
        step_time: the length of the step, in milliseconds, as the mean of all steps. The others are milliseconds per
            step too, one entry per rank.
        schedule: idle when every action takes the mean time of its kind over all stages: the schedule's own.
        imbalance: added when every action takes its own measured time: stages or microbatches that take longer make
            the others wait. Only this one can be negative, on ranks with more to do than others.
        host_overhead: added when ranks also begin when they began, and spend between actions the time that they spent
            outside actions and waits.
        communication: added by the step as it was measured: the delays of messages.

    A rank that begins before the first action, while others are still in the step before, only waits; one that begins
    late counts as host overhead. Time that delays no rank, such as a pause of the host on a rank that would have had to
    wait anyway, is in none of them.
    """

    step_time: float
    schedule: list[float]
    imbalance: list[float]
    host_overhead: list[float]
    communication: list[float]

    @property
    def shares(self) -> dict[str, float]:
        """The mean over the ranks of each cause, by its name in print, as a share of the step's time."""
        causes = {
            "the schedule's own": self.schedule,
            "uneven stages": self.imbalance,
            "waiting for communication": self.communication,
            "host": self.host_overhead,
        }
        return {name: fmean(times) / self.step_time for name, times in causes.items()}

    def __str__(self) -> str:
        shares = self.shares
        parts = " + ".join(f"{share:.1%} {name}" for name, share in shares.items())
        return f"{sum(shares.values()):.1%} = {parts}"


def split_bubble(timeline: Timeline) -> BubbleSplit:
    """Split the bubble of a measured timeline into its causes: the means over its steps."""
    plan, steps = timeline.plan, timeline.steps
    even_costs = timeline.even_costs()
    even_costs.p2p = 0.0
    even = simulate(plan, even_costs)
    schedule = [share * even.makespan for share in even.bubble]
    busy = [fmean(step[rank].busy for step in steps) for rank in range(plan.pp_size)]
    simulated = fmean(_simulate(plan, step, with_host=False) for step in steps)
    with_host = fmean(_simulate(plan, step, with_host=True) for step in steps)
    measured = fmean(map(step_time, steps))
    return BubbleSplit(
        step_time=measured,
        schedule=schedule,
        imbalance=[simulated - time - idle for time, idle in zip(busy, schedule)],
        host_overhead=[with_host - simulated] * plan.pp_size,
        communication=[measured - with_host] * plan.pp_size,
    )


def _simulate(plan: Plan, step: Sequence[RankStep], with_host: bool) -> float:
    """The time of the step if messages took none: with the measured actions, and with the host's pauses or without."""
    durations = {action: end - start for rank in step for action, start, end in rank.spans}
    clocks = [0.0] * plan.pp_size
    pauses = dict.fromkeys(durations, 0.0)
    if with_host:
        clocks = [rank.begin - first_start(step) for rank in step]
        pauses = {action: pause for rank in step for action, pause in rank.pauses().items()}
    play(plan, durations.__getitem__, Costs(), clocks, [[] for _ in step], pauses.__getitem__)
    return max(clocks)
