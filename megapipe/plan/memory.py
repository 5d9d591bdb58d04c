"""What a rank holds over the actions of a plan, in microbatches and in bytes: a cumulative sum over what each action
leaves.

Activations are counted as a plan has them: a unit holds what the row of its last action says (`Kind.keeps`). Messages
are counted by rule, since when a send is over depends on the moment: receives that are posted ahead, sends that are
kept until they are over, and a boundary between two stages of the same rank, where the output of one is the input of
the other.
"""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from .gathering import gathered_chunks
from .kinds import KINDS, Kind
from .plan_facts import PlanFacts
from .verbs import Action

PerStage = float | Sequence[float]

SHARED_OUT = ("saved", "replayed", "recomputed", "kept", "model", "gathered", "gradients")
"""Components for which a single number means a whole rank: it is shared out over the rank's chunks."""
Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True)
class StageBytes:
    """Bytes, by component and stage. A list has one number for each stage.

    Attributes:
        saved: what the F of a microbatch leaves for its backward: its input included, its output not. One number is
            that of a whole rank, shared out evenly over its chunks.
        replayed: what its F and its R leave together, where it has an R. None for as much as is saved.
        recomputed: what its R makes of that, and its F does not keep. None for all but the input, which is the message
            from the stage before.
        kept: what its B leaves for its W. None for as much as was saved: a layer that defers its weight gradient holds
            its input and the gradient of its output.
        model: weights, gradients, optimizer state and buckets, which are there all the time. One number is that of a
            rank.
        message: the output of a stage; the gradient that comes back for it is as large. One number is that of every
            stage.
        forward, recompute, backward, backward_input, backward_weight: most that F, R, BW, B or W of a microbatch needs
            while it runs, beyond what it finds and what it leaves. One number is that of every stage. A `backward` of
            None is the larger of its parts.
        replayed_forward: as `forward`, of an F that has an R. None for as much.
        gathered: weights that are there only while a chunk is gathered, sharded over replicas otherwise. One number is
            that of a rank.
        gradients: whole gradients of such weights, from a chunk's first backward to its last. One number is that of a
            rank.
        posted: how many receives of each channel are posted ahead: 2 over gloo, 0 over NCCL.
        posted_bytes: the receives that a rank posts on each channel when it waits for the first time: 1 MiB over gloo.
        outbox: sent messages are kept until they take so many bytes together, and then waited for: 1 MiB over gloo, 0
            over NCCL.
        max_gathered: chunks of a rank that are gathered at a time (`config.max_gathered_chunks`).

    Raises:
        ValueError: a number is negative or not finite.
    """

    saved: PerStage
    replayed: PerStage | None = None
    recomputed: PerStage | None = None
    kept: PerStage | None = None
    model: PerStage = 0.0
    message: PerStage = 0.0
    forward: PerStage = 0.0
    recompute: PerStage = 0.0
    backward: PerStage | None = None
    backward_input: PerStage = 0.0
    backward_weight: PerStage = 0.0
    replayed_forward: PerStage | None = None
    gathered: PerStage = 0.0
    gradients: PerStage = 0.0
    posted: int = 0
    posted_bytes: float = 0.0
    outbox: float = 0.0
    max_gathered: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            given = value if isinstance(value, Sequence) and "PerStage" in str(field.type) else [value]
            for number in [] if value is None and field.default is None else given:
                if not (isinstance(number, numbers.Real) and math.isfinite(number) and float(number) >= 0):
                    raise ValueError(f"{field.name} is a number of bytes from 0 on, got {number!r}.")

    def even(self, pp_size: int) -> StageBytes:
        """The same with all ranks alike, for plans with any number of chunks: of what shares are had (`saved`, `kept`,
        `model`) the mean rank's, of the others the largest."""
        numbers: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Sequence):
                value = sum(value) / pp_size if field.name in SHARED_OUT else max(value)
            numbers[field.name] = value
        return StageBytes(**numbers)

    def save(self, path: str | Path) -> None:
        """Write the numbers as JSON, for `load_stage_bytes` and `megapipe show --bytes`."""
        Path(path).write_text(json.dumps({"bytes": asdict(self)}) + "\n")

    def per_stage(self, component: str, plan: PlanFacts) -> list[float]:
        """The bytes of a component on each stage.

        Raises:
            ValueError: a list has not one for each.
        """
        value = getattr(self, component)
        if component == "recomputed" and value is None:
            inputs = [0.0, *self.per_stage("message", plan)]
            return [max(0.0, held - given) for held, given in zip(self.per_stage("replayed", plan), inputs)]
        if component in ("kept", "replayed", "replayed_forward") and value is None:
            value = self.forward if component == "replayed_forward" else self.saved
        if component == "backward" and value is None:
            return list(map(max, *(self.per_stage(part, plan) for part in ("backward_input", "backward_weight"))))
        num_stages = plan.pp_size * plan.num_chunks
        if not isinstance(value, Sequence):
            return [value / plan.num_chunks if component in SHARED_OUT else value] * num_stages
        if len(value) != num_stages:
            raise ValueError(f"{component} has one number for each of the {num_stages} stages, got {len(value)}.")
        return list(value)


@dataclass(frozen=True)
class RankBytes:
    """The bytes of one rank in a step.

    Attributes:
        model: those that are there all the time; the others count without them.
        during: the most in each action of the rank.
        after: what is held after it.
        messages: of `during`, what messages take.
        gathered: of `during`, what is whole of weights and gradients that replicas share out.
        gathers: how often the weights of a chunk are gathered in the step.
    """

    model: float
    during: Numbers
    after: Numbers
    messages: Numbers
    gathered: Numbers
    gathers: int

    @property
    def peak(self) -> float:
        """The most at any time, model included."""
        return self.model + float(self.during.max(initial=0.0))

    @property
    def parts(self) -> dict[str, float]:
        """The peak by its parts."""
        if not len(self.during):
            return {"model": self.model, "activations": 0.0, "messages": 0.0}
        at = int(self.during.argmax())
        parts = {"messages": float(self.messages[at])}
        if self.gathered.any():
            parts["gathered"] = float(self.gathered[at])
        return {"model": self.model, "activations": float(self.during[at]) - sum(parts.values()), **parts}


def rank_bytes(plan: PlanFacts, rank: int, stages: StageBytes) -> RankBytes:
    """The bytes of a rank over the actions of a plan.

    Raises:
        ValueError: a list of bytes has not one for each stage.
    """
    row = plan.actions[rank]
    of = {field.name: stages.per_stage(field.name, plan) for field in fields(stages)[:-4]}
    own = [stage for stage in range(len(of["saved"])) if plan.rank_of(stage) == rank]
    model = sum(of["model"][stage] for stage in own)
    done = [(action.stage, KINDS[action.kind]) for action in row]

    def look_up(fact: Callable[[int, Kind], float]) -> Numbers:
        return np.array([fact(*each) for each in done], float) / plan.num_slices

    of["input"] = [0.0, *of["message"][:-1]]
    left = look_up(lambda stage, kind: sum(of[component][stage] for component in kind.keeps))
    taken_over = _taken_over(row)
    has_r = np.array([action in taken_over for action in row], bool)
    left += has_r * look_up(lambda stage, _: of["replayed"][stage] - of["recomputed"][stage] - of["saved"][stage])
    extra = look_up(lambda stage, kind: of[kind.needs][stage] if kind.needs else 0.0)
    extra += has_r * look_up(lambda stage, _: of["replayed_forward"][stage] - of["forward"][stage])
    change = left - _of_the_action_before(row, left)
    local = {s: of["message"][s] if {s, s + 1} <= set(own) else 0.0 for s in range(-1, len(of["saved"]))}
    # What a stage hands to its neighbour on the same rank is held until the neighbour's action, which counts it as its
    # own.
    made = look_up(lambda s, kind: local[s - (kind.direction == "backward")] if kind.direction else 0.0)
    taken = look_up(lambda s, kind: local[s - (kind.direction == "forward")] if kind.direction else 0.0)
    gathered = gathered_chunks(plan, rank, stages.max_gathered) if any(of["gathered"]) else []
    whole, whole_after = _of_sharded(plan, row, gathered, of)
    held = (change + made - taken).cumsum()
    during = whole + held - made + extra + np.maximum(0.0, -change)
    posted, posted_after = _posted(plan, row, of["message"], stages, rank)
    sent = look_up(lambda s, kind: _sent(plan, rank, s, kind.direction, of["message"]))
    kept = _kept(sent, stages.outbox)
    before = np.concatenate([[0.0], kept[:-1]])
    gathers = sum(len(set(after) - set(before)) for before, after in pairwise([(), *gathered]))
    return RankBytes(
        model, during + posted + before, whole_after + held + posted_after + kept, posted + before, whole, gathers
    )


def _of_sharded(
    plan: PlanFacts, row: Sequence[Action], gathered: Sequence[Sequence[int]], of: Mapping[str, Sequence[float]]
) -> tuple[Numbers, Numbers]:
    """The bytes of gathered weights and whole gradients during each action, and after it. A chunk's first backward
    makes the gradients, and after its last action they are sharded."""
    stages = {plan.chunk_of(action.stage): action.stage for action in row}
    sizes = [sum(of["gathered"][stages[chunk]] for chunk in chunks) for chunks in gathered] or [0.0] * len(row)
    held, after = np.array(sizes, float), np.array([*sizes[1:], 0.0], float)
    for stage in stages.values():
        at = [n for n, action in enumerate(row) if action.stage == stage and KINDS[action.kind].completes_weights]
        if at:
            held[at[0] + 1 : at[-1] + 1] += of["gradients"][stage]
            after[at[0] : at[-1]] += of["gradients"][stage]
    return held, after


def peak_activations(plan: PlanFacts) -> list[float]:
    """`Simulation.peak_activations` of a plan."""
    return [peak_held(actions, "held") / (plan.num_chunks * plan.num_slices) for actions in plan.actions]


def peak_held(actions: Sequence[Action], what: str) -> int:
    """Most microbatches, or slices of them, that a rank holds at once, each chunk counted by itself.

    Args:
        what: as which field of `Kind` counts them, "in_flight" or "held".
    """
    return max(0, *accumulate(held_changes(actions, what)))


def held_changes(actions: Sequence[Action], what: str = "held") -> list[int]:
    """Changes of what a rank holds by each of its actions, in microbatches or slices of them; see `peak_held`."""
    taken_over = _taken_over(actions) if what == "held" else ()
    return [0 if action in taken_over else getattr(KINDS[action.kind], what) for action in actions]


def _taken_over(actions: Sequence[Action]) -> set[Action]:
    """Those for which another action of the same unit makes what they do not keep (`Kind.takes_over`)."""
    others = ((action, KINDS[action.kind].takes_over) for action in actions)
    return {action._replace(kind=kind) for action, kind in others if kind is not None}


def _of_the_action_before(row: Sequence[Action], values: Numbers) -> Numbers:
    """The value of the action before of the same unit on the same stage; 0 for its first one."""
    last: dict[Action, float] = {}
    found = np.zeros(len(values))
    for at, (action, value) in enumerate(zip(row, values)):
        unit = action._replace(kind="")
        found[at] = last.get(unit, 0.0)
        last[unit] = value
    return found


def _posted(
    plan: PlanFacts, row: Sequence[Action], message: Sequence[float], stages: StageBytes, rank: int
) -> tuple[Numbers, Numbers]:
    """The bytes of the receives that are posted during each action, and after it: no more than are still to come. One
    that an action takes is posted anew after it, once no more than `stages.posted` are."""
    during, after = np.zeros(len(row)), np.zeros(len(row))
    for way, offset in (("forward", -1), ("backward", 0)):
        for stage in {action.stage for action in row}:
            sender = stage + (1 if way == "backward" else -1)
            if not plan.has_stage(sender) or plan.rank_of(sender) == rank:
                continue
            takes = np.array([action.stage == stage and KINDS[action.kind].direction == way for action in row])
            size = message[stage + offset] / plan.num_slices
            taken = takes.cumsum()
            first = stages.posted_bytes // size if size else 0
            for posted, again in ((during, stages.posted - takes), (after, stages.posted)):
                posted += size * np.minimum(np.maximum(first - taken, again), taken[-1] - taken).clip(min=0)
    return during, after


def _kept(sent: Numbers, outbox: float) -> Numbers:
    """The bytes of sent messages after each action: all since they last took as many as `outbox`."""
    if not outbox:
        return sent
    kept, number = np.zeros(len(sent)), 0.0
    for at, own in enumerate(sent.tolist()):
        kept[at] = number = own + (number if number < outbox else 0.0)
    return kept


def _sent(plan: PlanFacts, rank: int, stage: int, way: str | None, message: Sequence[float]) -> float:
    """The bytes that an action sends to another rank."""
    taker = stage + (1 if way == "forward" else -1)
    if way is None or not plan.has_stage(taker) or plan.rank_of(taker) == rank:
        return 0.0
    return message[min(stage, taker)]
