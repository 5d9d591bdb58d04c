"""A plan played through time: when every action starts and ends, and what follows from that.

Each rank runs its actions in the plan's order, and waits where one needs a message that has not arrived. Nothing else
can hold it up: a channel carries one kind of message one way, in order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from .verbs import PAIR, Action

if TYPE_CHECKING:
    from .plan import Event, Instruction, Plan

__all__ = ["Costs", "Simulation", "Span", "peak_memory", "simulate"]

PerStage = float | Sequence[float]


@dataclass
class Costs:
    """What things take, in any unit of time.

    Attributes:
        forward, backward_input, backward_weight: a number is the time of one microbatch on a whole rank, shared out
            evenly over its chunks; a list has the time of each stage.
        p2p: from the end of an action until its result can be used on another rank, for a message of no size.
        message: time for which a message occupies its channel: its size over the bandwidth.
        optimizer: the optimizer's step on each rank, at the end of a training step.
        overlap: how much of the shorter one of an overlapped forward and backward the longer one hides: 0 where they
            run one after the other, 1 where the pair takes no longer than the longer one.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    p2p: float = 0.0
    message: float = 0.0
    optimizer: float = 0.0
    overlap: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for what no time can be."""
        for field_ in fields(self):
            value = getattr(self, field_.name)
            for time in [value] if isinstance(value, (int, float)) else value:
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"{field_.name} must be a finite number from 0 on, got {time:g}.")
        if self.overlap > 1:
            raise ValueError(f"overlap is a share between 0 and 1, got {self.overlap:g}.")

    def of(self, kind: str, num_stages: int, num_chunks: int) -> list[float]:
        """The time of an action of this kind on each stage."""
        parts = {
            "F": [self.forward],
            "BW": [self.backward_input, self.backward_weight],
            "B": [self.backward_input],
            "W": [self.backward_weight],
        }[kind]
        return [sum(times) for times in zip(*(self.per_stage(part, num_stages, num_chunks) for part in parts))]

    @staticmethod
    def per_stage(time: PerStage, num_stages: int, num_chunks: int) -> list[float]:
        if isinstance(time, (int, float)):
            return [time / num_chunks] * num_stages
        if len(time) != num_stages:
            raise ValueError(f"a list of times has one for each of the {num_stages} stages, got {len(time)}.")
        return list(time)


class Span(NamedTuple):
    """An action with its start and end."""

    action: Action
    start: float
    end: float


@dataclass
class Simulation:
    """Lists have one entry per rank. With several steps, `spans` holds all of them, one after the other."""

    spans: list[list[Span]]
    peak_activations: list[float]
    """Most microbatches held at once, from F to W, in microbatches of the whole rank: a chunk is its share of one."""
    peak_pending_weights: list[float]
    """Most of them between B and W, of which only what W needs is held."""
    peak_bytes: list[float]
    """Most bytes that both hold together, from what was said of one microbatch."""
    lower_bound: float
    """What no order of these actions can beat in one step, whatever its memory."""
    step_ends: list[float] = field(default_factory=list)
    """When the last rank ends each step, optimizer included."""
    overlap: float = 0.0
    """As in `Costs`."""

    @property
    def makespan(self) -> float:
        """From the start of the first action to the end of the last."""
        return max(rank[-1].end for rank in self.spans) - min(rank[0].start for rank in self.spans)

    @property
    def bubble(self) -> list[float]:
        """Share of the makespan in which the rank computes nothing; 0 where nothing takes any time."""
        return [_idle_share(rank, self.makespan) for rank in self.spans]

    @property
    def inner_bubble(self) -> list[float]:
        """The same between the rank's own first and last action: what is left when steps follow without a pause."""
        return [_idle_share(rank, rank[-1].end - rank[0].start) for rank in self.spans]

    @property
    def step_time(self) -> float:
        """Time per step in steady training: between the ends of the last two steps, or the makespan of the only one."""
        ends = self.step_ends
        return ends[-1] - ends[-2] if len(ends) > 1 else self.makespan

    def critical_path(self) -> list[tuple[int, Span]]:
        """The chain of (rank, span) that decides the makespan of one step: each starts as soon as the one before it,
        or its message, allows."""
        assert len(self.step_ends) == 1, "the critical path is that of one step"
        places = {
            span.action._replace(kind=span.action.kind[0]): (rank, index)
            for rank, spans in enumerate(self.spans)
            for index, span in enumerate(spans)
        }
        rank = max(range(len(self.spans)), key=lambda rank: self.spans[rank][-1].end)
        index = len(self.spans[rank]) - 1
        path = []
        while True:
            span = self.spans[rank][index]
            path.append((rank, span))
            if index and self.spans[rank][index - 1].end >= span.start:
                index -= 1
                continue
            sources = [places.get(span.action.source)]
            if self.overlap and index + 1 < len(self.spans[rank]):  # a pair waits for both of its messages
                sources.append(places.get(self.spans[rank][index + 1].action.source))
            found = [s for s in sources if s is not None and self.spans[s[0]][s[1]].end <= span.start + 1e-9]
            if not found:
                return path[::-1]
            rank, index = max(found, key=lambda s: self.spans[s[0]][s[1]].end)


def simulate(
    plan: Plan,
    costs: Costs,
    num_steps: int = 1,
    synchronize: bool = False,
    activation_bytes: PerStage = 0.0,
    deferred_bytes: PerStage = 0.0,
) -> Simulation:
    """Play `num_steps` steps of a plan.

    Steps follow each other without a barrier: a rank goes on to the next as soon as its own optimizer step is done.
    With `synchronize` the optimizer waits for all ranks' gradients, as it does to clip them by their common norm.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}.")
    num_stages = plan.pp_size * plan.num_chunks
    times = {kind: costs.of(kind, num_stages, plan.num_chunks) for kind in ("F", "BW", "B", "W")}
    activation, deferred = (
        costs.per_stage(size, num_stages, plan.num_chunks) for size in (activation_bytes, deferred_bytes)
    )
    share, nothing = [1 / plan.num_chunks] * num_stages, [0.0] * num_stages
    clocks = [0.0] * plan.pp_size
    spans: list[list[Span]] = [[] for _ in plan.events]
    step_ends = []
    for _ in range(num_steps):
        play(plan, lambda action: times[action.kind][action.stage], costs, clocks, spans)
        if synchronize:
            clocks = [max(clocks)] * plan.pp_size
        clocks = [clock + costs.optimizer for clock in clocks]
        step_ends.append(max(clocks))
    return Simulation(
        spans=spans,
        peak_activations=[peak_memory(actions, share, share) for actions in plan.actions],
        peak_pending_weights=[peak_memory(actions, nothing, share) for actions in plan.actions],
        peak_bytes=[peak_memory(actions, activation, deferred) for actions in plan.actions],
        lower_bound=_lower_bound(plan, costs),
        step_ends=step_ends,
        overlap=costs.overlap,
    )


def peak_memory(actions: Sequence[Action], activation: Sequence[float], deferred: Sequence[float]) -> float:
    """The most that a rank holds at once, where a microbatch of a stage holds `activation` of it between F and B and
    `deferred` between B and W."""
    held = peak = 0.0
    for stage, kind, _ in actions:
        if kind == "F":
            held += activation[stage]
        elif kind == "W":
            held -= deferred[stage]
        else:
            held -= activation[stage]
            if kind == "B":
                held += deferred[stage]
        peak = max(peak, held)
    return peak


def play(
    plan: Plan,
    duration: Callable[[Action], float],
    costs: Costs,
    clocks: list[float],
    spans: list[list[Span]],
    pause: Callable[[Action], float] = lambda action: 0.0,
) -> list[int]:
    """Run all ranks side by side from the times in `clocks`, which are moved on, and append what they do to `spans`.
    Before an action, and before it waits for its message, a rank is busy with other things for a `pause`.

    Returns how many of its events each rank has got through: all, unless the plan hangs.
    """
    arrivals: dict[Event, float] = {}  # when what an event sends can be used
    waiting: dict[Event, int] = {}  # the rank that waits for it
    busy_until: dict[tuple[str, int], float] = {}  # per channel
    shrunk = [1.0] * plan.pp_size  # what each rank's overlapped pair takes, of both its actions one after the other
    position = [0] * plan.pp_size
    runnable = list(range(plan.pp_size))
    while runnable:
        rank = runnable.pop()
        program = plan.program[rank]
        clock = clocks[rank]
        while position[rank] < len(program):
            event, action, needed, crosses = program[position[rank]]
            if action is not None:
                is_overlapped = costs.overlap and event.verb in PAIR
                sends = [] if needed is None else [needed]
                if is_overlapped and action.kind == "F":
                    other = _other_half(program, position[rank])
                    times = (duration(action), duration(other.action))  # type: ignore[arg-type]
                    shrunk[rank] = 1 - costs.overlap * min(times) / (sum(times) or 1.0)
                    sends += [] if other.needed is None else [other.needed]
                missing = next((send for send in sends if send not in arrivals), None)
                if missing is not None:
                    waiting[missing] = rank
                    break
                clock += pause(action)
                for send in sends:
                    clock = max(clock, arrivals[send])
                end = clock + duration(action) * (shrunk[rank] if is_overlapped else 1.0)
                spans[rank].append(Span(action, clock, end))
                clock = end
            elif event.sends:
                arrival = clock
                if crosses:
                    channel = (event.verb, event.stage)
                    arrival = max(clock, busy_until.get(channel, 0.0)) + costs.message
                    busy_until[channel] = arrival
                    arrival += costs.p2p
                arrivals[event] = arrival
                if event in waiting:
                    runnable.append(waiting.pop(event))
            position[rank] += 1
        clocks[rank] = clock
    return position


def _other_half(program: Sequence[Instruction], index: int) -> Instruction:
    """The backward of the overlapped pair whose forward is at `index`: soon to follow."""
    return next(program[k] for k in range(index + 1, len(program)) if program[k].event.verb == PAIR[1])


def _lower_bound(plan: Plan, costs: Costs) -> float:
    """A rank can begin only when the first microbatch has come up to it, and then has all its work to do; and the
    first microbatch has to go up and down through all stages."""
    num_stages = plan.pp_size * plan.num_chunks
    sizes = (num_stages, plan.num_chunks)
    forward, backward_input, backward_weight = (
        costs.per_stage(time, *sizes) for time in (costs.forward, costs.backward_input, costs.backward_weight)
    )
    hops = [
        0.0 if plan.rank_of(stage) == plan.rank_of(stage + 1) else costs.p2p + costs.message
        for stage in range(num_stages - 1)
    ]
    training = not plan.forward_only
    # Of a pair's two actions, either may seem to take up to half of the pair's gain less.
    overlap = costs.overlap if any(e.verb == PAIR[0] for events in plan.events for e in events) else 0.0
    bounds = []
    for rank in range(plan.pp_size):
        stages = [stage for stage in range(num_stages) if plan.rank_of(stage) == rank]
        backward = [training * (inputs + weights) for inputs, weights in zip(backward_input, backward_weight)]
        forwards, backwards = sum(forward[s] for s in stages), sum(backward[s] for s in stages)
        work = forwards + backwards - overlap * min(forwards, backwards)
        start = (1 - overlap / 2) * sum(forward[: stages[0]]) + sum(hops[: stages[0]])
        bounds.append(start + plan.num_microbatches * work)
    latency = sum(forward) + sum(hops)
    if training:
        latency += sum(backward_input) + sum(hops) + backward_weight[0]
    return max(*bounds, (1 - overlap / 2) * latency)


def _idle_share(spans: list[Span], duration: float) -> float:
    return 1 - sum(span.end - span.start for span in spans) / duration if duration else 0.0
