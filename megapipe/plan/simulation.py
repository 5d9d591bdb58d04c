"""A plan played through time: when every action starts and ends, and what follows from that.

Each rank runs its actions in the plan's order, and waits where one needs a message that has not arrived. Nothing else
can hold it up: a channel carries one kind of message one way, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from .check import check_ended
from .hidden_communication import hide
from .kinds import KINDS, RECOMPUTE
from .memory import RankBytes, StageBytes, peak_activations, rank_bytes
from .plan_facts import PlanFacts
from .program import run
from .verbs import Action

PerStage = float | Sequence[float]


@dataclass
class Costs:
    """Times, in any unit: milliseconds where they were measured.

    Attributes:
        forward, backward_input, backward_weight: a number is the time of one microbatch on a whole rank, shared out
            evenly over its chunks; a list has the time of each stage.
        recompute: the same for recomputation. None where it takes as long as the forward; less where only some layers
            are computed again.
        p2p: from the end of an action until its result can be used on another rank, for a message of no size.
        message: time for which a message occupies its channel: its size over the bandwidth.
        optimizer: the optimizer's step on each rank, at the end of a training step.
        exchange: the part of `forward`, and of `backward_input`, that is communication within the stage, such as
            exchanges of experts, and that pairs and pending Ws hide (hidden_communication.py). 0 where nothing is
            overlapped.
        slices: how long the slices of a sequence take beside each other, one number for each; they share out the times
            of a microbatch. None where all take as long. A message takes its equal share in any case.
        microbatches: how long microbatches take beside each other, one number for each; the times above are those of
            their mean. None where all take as long. A message takes its time in any case.
        memory: the bytes of each stage; None where they are not known.
        speeds: how fast each rank is, beside one on which actions take the times above; None where all are alike.

    Raises:
        ValueError: a time is negative or not finite, no slice or no microbatch takes any time, or a speed is not more
        than 0.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    p2p: float = 0.0
    message: float = 0.0
    optimizer: float = 0.0
    exchange: PerStage = 0.0
    slices: Sequence[float] | None = None
    microbatches: Sequence[float] | None = None
    recompute: PerStage | None = None
    memory: StageBytes | None = None
    speeds: Sequence[float] | None = None

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if isinstance(value, StageBytes):
                continue
            times = value if isinstance(value, Iterable) else [] if value is None else [value]
            for time in times:
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"{field_.name} must be a finite number from 0 on, got {time:g}.")
        for name in ("slices", "microbatches"):
            if (own := getattr(self, name)) is not None and not sum(own):
                raise ValueError(f"{name} are relative times of which one at least is more than 0, got {own}.")
        if self.speeds is not None and not min(self.speeds, default=0) > 0:
            raise ValueError(f"speeds must be more than 0, got {list(self.speeds)}.")

    def of_messages(self, plan: PlanFacts) -> dict[str, float]:
        """The arguments of the player that are times of messages."""
        return {"p2p": self.p2p, "message": self.message / plan.num_slices}

    def of_actions(self, plan: PlanFacts) -> Callable[[Action], float]:
        """Tells the time of an action."""
        nothing = [0.0] * plan.pp_size * plan.num_chunks
        times = {
            name: [sum(times) for times in zip(nothing, *(self.per_stage(cost, plan) for cost in kind.costs))]
            for name, kind in KINDS.items()
        }
        part_of = self._parts(plan)
        return lambda action: times[action.kind][action.stage] * part_of(action)

    def hidden(self, plan: PlanFacts) -> tuple[list[list[float]], list[list[float]] | None]:
        """The times of the actions less what is hidden of exchanges, by rank, and the `tails` of the player.

        Raises:
            ValueError: a stage's exchange takes longer than its F or B, of which it is a part.
        """
        time_of = self.of_actions(plan)
        durations = [list(map(time_of, row)) for row in plan.actions]
        exchange, weights = (self.per_stage(cost, plan) for cost in ("exchange", "backward_weight"))
        if not any(exchange):
            return durations, None
        for cost in ("forward", "backward_input"):
            for part, whole in zip(exchange, self.per_stage(cost, plan)):
                if part > whole:
                    raise ValueError(f"exchange is a part of {cost}, got {part:g} of {whole:g}.")
        part_of = self._parts(plan)
        of_action = [lambda action, of=of: of[action.stage] * part_of(action) for of in (exchange, weights)]
        ranks = zip(plan.actions, plan.program.pairs, durations)
        left, tails = zip(*(hide(*rank, *of_action) for rank in ranks))
        return list(left), list(tails)

    def _parts(self, plan: PlanFacts) -> Callable[[Action], float]:
        """Tells the time of an action beside that of a whole microbatch of mean length."""
        shares = self.shares(plan.num_slices)
        if self.microbatches is None:
            return lambda action: shares[action.slice]
        lengths = self.lengths(plan.num_microbatches)
        return lambda action: shares[action.slice] * lengths[action.microbatch]

    def lengths(self, num_microbatches: int) -> list[float]:
        """The time of each microbatch beside their mean."""
        lengths = [1.0] * num_microbatches if self.microbatches is None else self.microbatches
        if len(lengths) != num_microbatches:
            raise ValueError(
                f"microbatches has one relative time for each of the {num_microbatches}, got {len(lengths)}."
            )
        return [time / sum(lengths) * num_microbatches for time in lengths]

    def shares(self, num_slices: int) -> list[float]:
        """The share of each slice in the times of a microbatch."""
        slices = [1.0] * num_slices if self.slices is None else self.slices
        if len(slices) != num_slices:
            raise ValueError(f"slices has one relative time for each of the {num_slices} slices, got {len(slices)}.")
        return [time / sum(slices) for time in slices]

    def per_stage(self, cost: str, plan: PlanFacts) -> list[float]:
        """The time of a field on each stage."""
        time, num_chunks = getattr(self, cost), plan.num_chunks
        if time is None:
            time = self.forward
        num_stages = plan.pp_size * num_chunks
        times = list(time) if isinstance(time, Iterable) else [time / num_chunks] * num_stages
        if len(times) != num_stages:
            raise ValueError(f"a list of times has one for each of the {num_stages} stages, got {len(times)}.")
        if self.speeds is None:
            return times
        if len(self.speeds) != plan.pp_size:
            raise ValueError(f"speeds has one for each of the {plan.pp_size} ranks, got {len(self.speeds)}.")
        return [time / self.speeds[plan.rank_of(stage)] for stage, time in enumerate(times)]


class Span(NamedTuple):
    """An action with its start and end, in the unit of its costs: milliseconds where it was measured."""

    action: Action
    start: float
    end: float


@dataclass
class Simulation:
    """Lists have one entry per rank. With several steps, `spans` holds all of them, one after the other."""

    spans: list[list[Span]]
    peak_activations: list[float]
    """Most microbatches in flight at once, from F to W, in those of a whole rank: on one of v chunks each is 1 / v, and
    one of n slices is 1 / n."""
    lower_bound: float
    """A time that no order of these actions can beat in one step, however much memory it may use."""
    step_ends: list[float]
    """When the last rank ends each step, optimizer included."""
    memory: list[RankBytes] | None = None
    """The bytes of a step; None where those of the stages are not known."""

    @property
    def peak_bytes(self) -> list[float]:
        """Most bytes that each rank holds at once; none where those of the stages are not known."""
        return [rank.peak for rank in self.memory or ()]

    @property
    def makespan(self) -> float:
        """Time from the start of the first action to the end of the last."""
        return max(rank[-1].end for rank in self.spans) - min(rank[0].start for rank in self.spans)

    @property
    def bubble(self) -> list[float]:
        """Share of the makespan in which the rank computes nothing; 0 where nothing takes any time."""
        makespan = self.makespan
        return [_idle_share(rank, makespan) for rank in self.spans]

    @property
    def inner_bubble(self) -> list[float]:
        """The same between the rank's own first and last action: what is left when steps follow without a pause."""
        return [_idle_share(rank, rank[-1].end - rank[0].start) for rank in self.spans]

    @property
    def step_time(self) -> float:
        """Time per step in steady training: between the ends of the last two steps, or the makespan of the only one."""
        ends = self.step_ends
        return ends[-1] - ends[-2] if len(ends) > 1 else self.makespan


def simulate(plan: PlanFacts, costs: Costs, num_steps: int = 1, synchronize: bool = False) -> Simulation:
    """Play a plan through time, as `Plan.simulate` does.

    Args:
        num_steps: steps that follow each other without a barrier: a rank begins the next one as soon as its own
            optimizer step is done.
        synchronize: the optimizer waits for the gradients of all ranks, as it does to clip them by their common norm.

    Raises:
        ValueError: `num_steps` is less than 1, or a list of times has not one for each stage.
        ScheduleError: a rank waits for ever.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
    (durations, tails), of_messages = costs.hidden(plan), costs.of_messages(plan)
    clocks = [0.0] * plan.pp_size
    spans: list[list[Span]] = [[] for _ in clocks]
    step_ends = []
    for _ in range(num_steps):
        starts, ends = run(plan.program, durations, clocks, None, tails, **of_messages)
        check_ended(plan, ends)
        for rank, actions in enumerate(plan.actions):
            spans[rank] += map(Span, actions, starts[rank], ends[rank])
        if synchronize:
            clocks = [max(clocks)] * plan.pp_size
        clocks = [clock + costs.optimizer for clock in clocks]
        step_ends.append(max(clocks))
    memory = None if costs.memory is None else [rank_bytes(plan, rank, costs.memory) for rank in range(plan.pp_size)]
    return Simulation(spans, peak_activations(plan), _lower_bound(plan, costs), step_ends, memory)


def play(
    plan: PlanFacts,
    duration: Callable[[Action], float],
    costs: Costs,
    clocks: list[float],
    spans: list[list[Span]],
    pause: Callable[[Action], float] | None = None,
) -> None:
    """Play one step whose actions take times of the caller's own, such as measured ones.

    Args:
        duration: the time of an action.
        costs: the times of messages; its times of actions are not used.
        clocks: the time at which each rank begins; moved on to the time at which it ends.
        spans: by rank; the actions of this step are appended.
        pause: how long a rank is busy with other things before an action, and before it waits for its message.
    """

    def begin(rank: int, index: int, clock: float, arrival: float) -> float:
        return clock + pause(plan.actions[rank][index])  # type: ignore[misc]

    durations = [list(map(duration, actions)) for actions in plan.actions]
    begins = None if pause is None else begin
    starts, ends = run(plan.program, durations, clocks, begins, None, **costs.of_messages(plan))
    for rank, actions in enumerate(plan.actions):
        spans[rank] += map(Span, actions, starts[rank], ends[rank])


def _lower_bound(plan: PlanFacts, costs: Costs) -> float:
    """A rank can begin only when a microbatch, or its first slice, has come up to it, and then has all its work to do;
    and the longest microbatch, or its longest slice, has to go up and down through all stages."""
    num_stages = plan.pp_size * plan.num_chunks
    forward, inputs, weights, exchange = (
        costs.per_stage(cost, plan) for cost in ("forward", "backward_input", "backward_weight", "exchange")
    )
    time_of = costs.of_actions(plan)
    shares, lengths = costs.shares(plan.num_slices), costs.lengths(plan.num_microbatches)
    hops = [
        0.0 if plan.rank_of(stage) == plan.rank_of(stage + 1) else costs.p2p + costs.message / plan.num_slices
        for stage in range(num_stages - 1)
    ]
    training = not plan.forward_only
    alone = [min(part / 2, weight) for part, weight in zip(exchange, weights)]
    pairs = any(map(bool, plan.program.pairs))
    bounds = []
    for rank in range(plan.pp_size):
        stages = [stage for stage in range(num_stages) if plan.rank_of(stage) == rank]
        # The Ws of a chunk hide exchanges of others, too.
        hidden, most = 2 * sum(exchange[s] for s in stages), sum(weights[s] for s in stages)
        hidden = training * (hidden if pairs else min(hidden, most))
        work = sum(forward[s] + training * (inputs[s] + weights[s]) for s in stages) - hidden
        start = min(lengths) * shares[0] * sum(forward[: stages[0]]) + sum(hops[: stages[0]])
        recompute = sum(time_of(action._replace(kind=RECOMPUTE.name)) for action in plan.recomputed[rank])
        bounds.append(start + plan.num_microbatches * work + recompute)
    longest = max(lengths) * max(shares)
    latency = longest * sum(forward) + sum(hops)
    if training:
        latency += longest * (sum(inputs) + weights[0] - alone[0]) + sum(hops)
    return max(*bounds, latency)


def _idle_share(spans: Sequence[Span], duration: float) -> float:
    return 1 - sum(end - start for _, start, end in spans) / duration if duration else 0.0
