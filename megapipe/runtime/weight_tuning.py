"""Weight-gradient passes (W) where the measured times want them.

Every rank's actions are timed in every step. Every few steps the ranks post their median times. Two steps later, when
every rank has posted its own, each simulates the schedule with all of them and finds the same places for the Ws
(plan/weight_placement.py). Between those steps nothing is exchanged.

A step asks the tuner three things: `begin_step` before it, for the settings and the places of this rank's Ws; `str`,
for what ranks must agree on; and `end_step` after it, with the record of its times.
"""

from __future__ import annotations

import functools
import json
import logging
import zlib
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from ..failures import Mailbox
from ..plan import Costs, Counts, Plan, Schedule, Settings, make_plan, move_weights, place_weights, simulate
from .plans import PlanKey
from .step_record import StepRecord

__all__ = ["Choice", "WeightTuner", "choose"]

logger = logging.getLogger(__name__)

FIRST, INTERVAL = 6, 10
"""The step before which times are first exchanged, and the steps between exchanges. The first step is not like the
others and the last may still run, so the first medians are of three steps, the later ones of nine."""

DRIFT = 0.05
"""How far a time may move, as a share of the mean action, before the search is repeated. A guess: small changes hardly
move the best places, and a search takes a tenth of a second."""

GAIN = 0.005
"""Share of the makespan that a choice must gain by the plan. Less than that disappears in the noise of measured steps
(docs/benchmarks.md)."""

SLACK = 1 / 4
"""Without a limit, how much more a rank may hold than by the schedule: this share of a pipeline's microbatches."""


@dataclass(frozen=True)
class Choice:
    """How a schedule is to be run.

    Attributes:
        settings: those to record and run it with.
        counts: the places of its Ws; None for the schedule's own.
        makespan, own_makespan: of one step, by the plan, and with the schedule's own places.
    """

    settings: Settings
    counts: Counts | None
    makespan: float
    own_makespan: float


def choose(
    schedule: Schedule,
    pp_size: int,
    num_microbatches: int,
    num_chunks: int,
    settings: Settings,
    costs: Costs,
    num_slices: int = 1,
) -> Choice:
    """Places for the Ws, and within the limit on memory the number of warmup forwards, that make a step shortest.

    Deterministic: the same costs give the same choice on every rank. The others are a PlanKey's.
    """
    record = functools.partial(make_plan, schedule, pp_size, num_microbatches, num_chunks, num_slices=num_slices)
    own = record(settings=settings)
    simulation = simulate(own, costs)
    own_makespan = simulation.makespan
    best = Choice(settings, None, own_makespan, own_makespan)
    limit = settings.max_in_flight
    max_held = max(simulation.peak_activations) + SLACK * pp_size if limit is None else limit
    starts = [settings] if limit is None else [replace(settings, max_in_flight=n) for n in _spread(pp_size, limit)]
    seen: list[Plan] = []
    for start in starts:
        try:
            plan = record(settings=start)
        except ValueError:
            continue  # this schedule needs more in any case
        if any(plan.events == other.events for other in seen):
            continue
        seen.append(plan)
        counts = place_weights(plan, costs, max_held)
        makespan = simulate(move_weights(plan, counts), costs).makespan
        if makespan < min(best.makespan, (1 - GAIN) * own_makespan):
            best = Choice(start, counts, makespan, own_makespan)
    return best


def _spread(pp_size: int, limit: float) -> list[float]:
    """A few limits between 1F1B's and `limit`."""
    low = min(float(pp_size), limit)
    return [low + (limit - low) * k / 4 for k in range(5)]


class WeightTuner:
    """For one schedule with one number of microbatches, in one pipeline."""

    choose = staticmethod(choose)

    def __init__(self, mailbox: Mailbox, pp_rank: int, key: PlanKey) -> None:
        self._mailbox = mailbox
        self._rank = pp_rank
        self._own_key = key
        self._name = f"times of {key.schedule.name} {key[1:]}"
        self._num_steps = 0
        self._posted = 0  # the step before which times were last posted
        self._records: deque[StepRecord] = deque(maxlen=INTERVAL)
        self._measured: Costs | None = None  # what the choice was made for
        self.choice: Choice | None = None

    @property
    def key(self) -> PlanKey:
        """Of the plan that steps are run by, but for the places of its Ws."""
        return self._own_key if self.choice is None else self._own_key._replace(settings=self.choice.settings)

    def __str__(self) -> str:
        """Short, the same where the choice is."""
        return "the schedule's" if self.choice is None else f"{zlib.crc32(repr(self.choice).encode()):08x}"

    def begin_step(self) -> tuple[PlanKey, list[int] | None]:
        """Before each training step, on every rank.

        Returns:
            The key of the plan to run, and the places of this rank's Ws: how many come before each of its forwards and
            backwards. None for the schedule's own places.
        """
        self._num_steps += 1
        if self._num_steps >= FIRST and (self._num_steps - FIRST) % INTERVAL == 0:
            self._post()
        elif self._posted and self._num_steps == self._posted + 2:
            self._decide([json.loads(text) for text in self._mailbox.collect(f"{self._name} {self._posted}")])
        counts = None if self.choice is None else self.choice.counts
        return self.key, None if counts is None else counts[self._rank]

    def end_step(self, record: StepRecord) -> None:
        if self._num_steps > 1:  # the first one is not like those that follow
            self._records.append(record)

    def _post(self) -> None:
        """The median times of each kind of action on each of this rank's stages, and of a whole step: now and then
        something takes much longer, and is no news of the next steps."""
        times: defaultdict[str, list[float]] = defaultdict(list)
        # The last step may still be under way on a device.
        finished = list(self._records)[:-1]
        for record in finished:
            for action, duration in record.durations():
                times[f"{action.stage} {action.kind} {action.slice}"].append(duration)
        means = {name: median(values) for name, values in times.items()}
        means["step"] = median(record.duration() for record in finished)
        self._records.clear()
        if self._posted:
            self._mailbox.withdraw(f"{self._name} {self._posted}")
        self._posted = self._num_steps
        self._mailbox.post(f"{self._name} {self._posted}", json.dumps(means))

    def _decide(self, means: Sequence[dict[str, float]]) -> None:
        plan = self._plan_in_use()
        costs = _costs(plan, means)
        if self._measured is not None and not _has_drifted(costs, self._measured):
            return
        costs.p2p = _latency(plan, costs, max(one["step"] for one in means))
        self._measured = costs
        self.choice = self.choose(*self._own_key[:-1], costs, self._own_key.num_slices)
        logger.info(
            "pipeline rank %d, %s: Ws moved by measured times, a step of %.4g s instead of %.4g s by the plan",
            *(self._rank, self._own_key.schedule.name, self.choice.makespan, self.choice.own_makespan),
        )

    def _plan_in_use(self) -> Plan:
        plan = self.key.plan
        return plan if self.choice is None or self.choice.counts is None else move_weights(plan, self.choice.counts)


def _costs(plan: Plan, means: Sequence[dict[str, float]]) -> Costs:
    merged = {name: mean for one in means for name, mean in one.items()}
    stages, parts = range(plan.pp_size * plan.num_chunks), range(plan.num_slices)
    forward, inputs, weights = (
        [sum(merged.get(f"{stage} {kind} {part}", 0.0) for part in parts) for stage in stages] for kind in "FBW"
    )
    of_slices = [sum(merged.get(f"{stage} {kind} {part}", 0.0) for stage in stages for kind in "FBW") for part in parts]
    return Costs(forward, inputs, weights, slices=of_slices if len(parts) > 1 else None)


def _lists(costs: Costs) -> list[float]:
    parts = (costs.forward, costs.backward_input, costs.backward_weight)
    return [time for part in parts if isinstance(part, list) for time in part]


def _has_drifted(costs: Costs, before: Costs) -> bool:
    now, then = _lists(costs), _lists(before)
    return max(abs(a - b) for a, b in zip(now, then)) > DRIFT * fmean(then)


def _latency(plan: Plan, costs: Costs, step: float) -> float:
    """The latency that makes the plan as long as the step was: it stands for all that is not computation. Where it
    would be long beside an action, something else was slow."""
    low, high = 0.0, fmean(_lists(costs)) / 4
    for _ in range(6):
        middle = (low + high) / 2
        if simulate(plan, replace(costs, p2p=middle)).makespan > step:
            high = middle
        else:
            low = middle
    return low
