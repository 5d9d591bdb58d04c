"""Where the idle time of a measured timeline comes from: the bubble, split into its causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from ..plan import Action, Costs, Plan, RankStep, play, simulate
from .timeline import Timeline, first_start, step_time


@dataclass(frozen=True)
class BubbleSplit:
    """The time in which ranks computed nothing, split into five causes.

    A rank's bubble is the length of the step, from the start of the first action of all ranks to the end of the last
    one, less the time in which the rank computes. The plan is simulated several times, each time with one more measured
    effect. What an effect adds is put down to it, so the five add up to the bubble exactly. Messages take no time in
    the simulations.

    Attributes:
        step_time: the length of the step, in milliseconds, as the mean of all steps. The others are milliseconds per
            step too, one entry per rank.
        schedule: idle when every action takes the mean time of its kind over all stages: the schedule's own.
        imbalance: added when every action takes the mean time of its kind on its own stage, and in its slice: stages
            that take longer make the others wait. Negative on ranks with more to do than others.
        jitter: added when every action takes its own measured time: microbatches that take longer than others on the
            same stage, or steps. Negative where the slow ones come when no rank waits for them.
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
    jitter: list[float]
    host_overhead: list[float]
    communication: list[float]

    @property
    def shares(self) -> dict[str, float]:
        """The mean over the ranks of each cause, by its name in print, as a share of the step's time."""
        causes = {
            "the schedule's own": self.schedule,
            "uneven stages": self.imbalance,
            "jitter": self.jitter,
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
    uneven = _simulate(plan, _mean_durations(steps))
    own_times = fmean(_simulate(plan, _durations(step).__getitem__) for step in steps)
    with_host = fmean(_simulate(plan, _durations(step).__getitem__, host=step) for step in steps)
    measured = fmean(map(step_time, steps))
    return BubbleSplit(
        step_time=measured,
        schedule=schedule,
        imbalance=[uneven - time - idle for time, idle in zip(busy, schedule)],
        jitter=[own_times - uneven] * plan.pp_size,
        host_overhead=[with_host - own_times] * plan.pp_size,
        communication=[measured - with_host] * plan.pp_size,
    )


def _durations(step: Sequence[RankStep]) -> dict[Action, float]:
    return {action: end - start for rank in step for action, start, end in rank.spans}


def _mean_durations(steps: Sequence[Sequence[RankStep]]) -> Callable[[Action], float]:
    """Tells the mean time of an action's kind on its stage, in its slice: over all microbatches and steps."""
    times: defaultdict[Action, list[float]] = defaultdict(list)
    for step in steps:
        for action, duration in _durations(step).items():
            times[action._replace(microbatch=0)].append(duration)
    means = {action: fmean(durations) for action, durations in times.items()}
    return lambda action: means[action._replace(microbatch=0)]


def _simulate(plan: Plan, duration: Callable[[Action], float], host: Sequence[RankStep] | None = None) -> float:
    """The time of the step if messages took none.

    Args:
        duration: of an action.
        host: a measured step; its ranks begin when they began there, and pause between actions as there.
    """
    clocks = [0.0] * plan.pp_size
    pauses = {}
    if host is not None:
        clocks = [rank.begin - first_start(host) for rank in host]
        pauses = {action: pause for rank in host for action, pause in rank.pauses().items()}
    play(plan, duration, Costs(), clocks, [[] for _ in clocks], lambda action: pauses.get(action, 0.0))
    return max(clocks)
