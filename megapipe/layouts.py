"""Which layers a stage holds: as many as others, as many as somebody says, or as many as make a step short."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Callable, Sequence

from .plan import Costs, Plan, StageBytes, StageInfo, simulate


def distribute_layers(
    num_layers: int,
    stage: StageInfo,
    num_virtual_layers_pre: float = 0,
    num_virtual_layers_post: float = 0,
    *,
    layout: str | Sequence[int] | None = None,
    costs: Sequence[float] | None = None,
    memory: Sequence[float] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    plan: Plan | None = None,
    speeds: Sequence[float] | None = None,
    activations: Sequence[float] | None = None,
) -> range:
    """The global numbers of the layers that `stage` holds. Together the stages hold each layer exactly once.

    All stages hold as many layers; where they do not divide, earlier stages hold one more. With `layout` or `costs`
    some stages may hold none.

    Args:
        num_layers: layers of the whole model.
        num_virtual_layers_pre: how many layers an embedding in front is worth in time. The first stage holds that many
            fewer. With `costs`, its cost in their unit, and any number.
        num_virtual_layers_post: the same for a head behind, on the last stage.
        layout: how many layers each stage holds, in the order of the stages; or a text in the manner of Megatron-LM's
            `--pipeline-model-parallel-layout`, such as "Et*3|(tt|)*29,m|L": stages apart by |, a letter for each thing
            that they hold (E embedding, t layer, m multi-token prediction, L loss), *n for what is repeated, of one
            letter or of several in parentheses; commas mean nothing.
        costs: what each layer takes, in any unit, as measured. The slowest stage is then as fast as can be, and the
            others are as even as that allows.
        memory: what each layer holds, in any unit.
        memory_limit: the most that a stage may hold, or one limit for each stage. Goes with `memory` and `costs`. With
            a plan it is that of a rank, less what the embedding or the head takes there, and needs no `costs`.
        plan: the plan of the steps, from `make_plan`: the layers are then where they make its step shortest, within
            what each rank may hold. Without `costs` all layers cost 1. A third of each cost is F's, a third B's and a
            third W's.
        speeds: how fast each rank of the plan is, such as [1, 1, 0.5, 0.5].
        activations: what a microbatch leaves in each layer for its backward, in the unit of `memory`. A rank holds it
            for as many as the plan has in flight there.

    Raises:
        TypeError: `stage` is something else.
        ValueError: the layers cannot be shared out like that.
    """
    if not isinstance(stage, StageInfo):
        raise TypeError(
            f"distribute_layers takes a StageInfo second, one of those that stages_for_rank(schedule) returns, got "
            f"{stage!r}."
        )
    if stage.index not in range(stage.num_stages):
        raise ValueError(f"a stage of {stage.num_stages} is one from 0 to {stage.num_stages - 1}, got {stage.index}.")
    if plan is None and (speeds is not None or activations is not None):
        raise ValueError("speeds and activations need the plan of the steps: pass plan=make_plan(schedule, ...).")
    ends = (num_virtual_layers_pre, num_virtual_layers_post)
    sizes = _sizes_by(
        stage.num_stages, num_layers, ends, layout, plan, costs, speeds, memory, activations, memory_limit
    )
    start = sum(sizes[: stage.index])
    return range(start, start + sizes[stage.index])


def _sizes_by(
    num_stages: int,
    num_layers: int,
    ends: tuple[float, float],
    layout: str | Sequence[int] | None,
    plan: Plan | None,
    costs: Sequence[float] | None,
    speeds: Sequence[float] | None,
    memory: Sequence[float] | None,
    activations: Sequence[float] | None,
    memory_limit: float | Sequence[float] | None,
) -> list[int]:
    """How many layers each stage holds. Takes the arguments of `distribute_layers`."""
    if layout is not None:
        if plan is not None or costs is not None or any(ends):
            raise ValueError("a layout says how many layers each stage holds: pass no costs or virtual layers with it.")
        return _sizes_of(layout, num_layers, num_stages)
    if plan is not None:
        if num_stages != plan.pp_size * plan.num_chunks:
            raise ValueError(
                f"the plan has {plan.pp_size} ranks and {plan.num_chunks} chunks on each, but there are "
                f"{num_stages} stages: make it for the schedule, the ranks and the chunks that train."
            )
        return _by_plan(plan, num_layers, ends, costs, speeds, memory, activations, memory_limit)
    if costs is not None:
        limits = _limits(memory, memory_limit, num_layers, num_stages)
        if len(costs) != num_layers or min(costs, default=0) < 0:
            raise ValueError(f"costs must be {num_layers} numbers from 0 on, one for each layer, got {list(costs)}.")
        return list(fastest(tuple(costs), num_stages, ends, tuple(memory or [0.0] * num_layers), limits))
    if memory is not None or memory_limit is not None:
        raise ValueError("a memory limit needs the costs of layers, to choose among splits: pass costs.")
    return _even(num_layers, num_stages, *ends)


def _even(num_layers: int, num_stages: int, pre: float, post: float) -> list[int]:
    if pre != int(pre) or post != int(post):
        raise ValueError(f"virtual layers must be whole numbers without costs, got {pre} in front and {post} behind.")
    pre, post = int(pre), int(post)
    base, extra = divmod(num_layers + pre + post, num_stages)
    sizes = [base + (index < extra) for index in range(num_stages)]
    sizes[0] -= pre
    sizes[-1] -= post
    if min(sizes) < 1:
        raise ValueError(
            f"{num_layers} layers, with {pre} virtual ones in front and {post} behind, leave stage "
            f"{sizes.index(min(sizes))} of {num_stages} without a layer: use more layers, fewer stages (pipeline ranks "
            "times chunks), or fewer virtual layers; or say by a layout that this is meant."
        )
    return sizes


# Layouts


def _sizes_of(layout: str | Sequence[int], num_layers: int, num_stages: int) -> list[int]:
    if isinstance(layout, str):
        stages = _expand(layout).split("|")
        if not re.fullmatch(r"Et*m*L", everything := "".join(stages)):
            raise ValueError(
                f"the layout {layout!r} holds {everything!r}: it must be one E, then t for each layer, m for each "
                "layer of multi-token prediction, and one L, with | between stages, *n behind a letter or parentheses "
                "to repeat."
            )
        sizes = [held.count("t") for held in stages]
    else:
        sizes = list(layout)
    if len(sizes) != num_stages or sum(sizes) != num_layers or min(sizes) < 0:
        raise ValueError(
            f"the layout {layout!r} has {sum(sizes)} layers on {len(sizes)} stages, but there are {num_layers} layers "
            f"and {num_stages} stages (pipeline ranks times chunks): make them the same."
        )
    return sizes


def _expand(layout: str) -> str:
    """The layout without commas, spaces and repetitions."""
    text = re.sub(r"[,\s]", "", layout)
    while (shorter := re.sub(r"\(([^()]*)\)(?:\*(\d+))?|([^()*])\*(\d+)", _repeat, text)) != text:
        text = shorter
    return text


def _repeat(found: re.Match[str]) -> str:
    group, times, letter, letter_times = found.groups()
    return letter * int(letter_times) if group is None else group * int(times or 1)


# Costs


def _limits(
    memory: Sequence[float] | None, limit: float | Sequence[float] | None, num_layers: int, num_stages: int
) -> tuple[float, ...]:
    """One per stage."""
    if (memory is None) != (limit is None):
        raise ValueError("memory and memory_limit go together: pass both or none.")
    if memory is not None and len(memory) != num_layers:
        raise ValueError(f"memory must be {num_layers} numbers, one for each layer, got {len(memory)}.")
    limits = list(limit) if isinstance(limit, Sequence) else [math.inf if limit is None else limit] * num_stages
    if len(limits) != num_stages:
        raise ValueError(f"memory_limit must be one number, or {num_stages}, one for each stage, got {len(limits)}.")
    return tuple(limits)


def _by_plan(
    plan: Plan,
    num_layers: int,
    ends: tuple[float, float],
    costs: Sequence[float] | None,
    speeds: Sequence[float] | None,
    memory: Sequence[float] | None,
    activations: Sequence[float] | None,
    limit: float | Sequence[float] | None,
) -> list[int]:
    """The sizes of the stages whose step is shortest by the plan."""
    layers = [[1.0] * num_layers if costs is None else costs, memory or [0.0] * num_layers]
    layers.append(activations or [0.0] * num_layers)
    for name, values in zip(("costs", "memory", "activations"), layers):
        if len(values) != num_layers or min(values) < 0:
            raise ValueError(f"{name} must be {num_layers} numbers from 0 on, one for each layer, got {list(values)}.")
    limits = list(limit) if isinstance(limit, Sequence) else [math.inf if limit is None else limit] * plan.pp_size
    sums = [[0.0, *itertools.accumulate(values)] for values in layers]
    num_stages = plan.pp_size * plan.num_chunks
    extra = [ends[0], *[0.0] * (num_stages - 2), ends[1]] if num_stages > 1 else [sum(ends)]

    def costs_of(sizes: Sequence[int]) -> Costs:
        places = [0, *itertools.accumulate(sizes)]
        times, held, saved = ([one[stop] - one[start] for start, stop in itertools.pairwise(places)] for one in sums)
        thirds = [(time + more) / 3 for time, more in zip(times, extra)]
        return Costs(thirds, thirds, thirds, memory=StageBytes(saved=saved, model=held), speeds=speeds)

    simulate(plan, costs_of([num_layers, *[0] * (len(extra) - 1)]))  # which says what is wrong with speeds
    faster = tuple(1.0 if speeds is None else speeds[plan.rank_of(stage)] for stage in range(len(extra)))
    if len(limits) != plan.pp_size:
        raise ValueError(f"with a plan there is one memory_limit, or one for each of {plan.pp_size} ranks.")
    unlimited = (0.0,) * num_layers, (math.inf,) * len(extra)
    return shortest(plan, fastest(tuple(layers[0]), len(extra), ends, *unlimited, faster), costs_of, limits)


PLAYS = 100_000
"""How many actions the search for a layout may play: some seconds."""


def shortest(
    plan: Plan, sizes: Sequence[int], costs_of: Callable[[Sequence[int]], Costs], limits: Sequence[float]
) -> list[int]:
    """The sizes of the stages whose step is shortest by a plan: from some sizes on, layers go from stage to stage for
    as long as that helps. What ranks lack of memory counts before time.

    Args:
        costs_of: the times and the bytes of the stages, by their sizes.
        limits: the most bytes that each rank may hold.

    Raises:
        ValueError: no sizes were found that fit.
    """

    def quality(sizes: Sequence[int]) -> tuple[float, float]:
        simulation = simulate(plan, costs_of(sizes))
        lacking = sum(max(0.0, held - most) for held, most in zip(simulation.peak_bytes, limits))
        return lacking, simulation.makespan

    sizes, best, moved = list(sizes), quality(sizes), True
    plays_left = PLAYS // sum(map(len, plan.actions))
    while moved and plays_left > 0:
        moved = False
        for source, target in itertools.permutations(range(len(sizes)), 2):
            trial = [size + (stage == target) - (stage == source) for stage, size in enumerate(sizes)]
            if trial[source] >= 0 and plays_left > 0:
                plays_left -= 1
                if (found := quality(trial)) < best:
                    sizes, best, moved = trial, found, True
    if best[0] > 0:
        raise ValueError(
            f"no layout of {sum(sizes)} layers was found that fits {', '.join(f'{limit:g}' for limit in limits)}: the "
            f"nearest, {sizes}, lacks {best[0]:g}. Use more ranks, or a schedule that holds less."
        )
    return sizes


@functools.lru_cache(maxsize=16)
def fastest(
    costs: tuple[float, ...],
    num_stages: int,
    ends: tuple[float, float],
    memory: tuple[float, ...],
    limits: tuple[float, ...],
    speeds: tuple[float, ...] | None = None,
) -> tuple[int, ...]:
    """The sizes of the stages. First the time of the slowest stage is found, then the most even split that keeps it.

    Args:
        limits, speeds: of each stage.
    """
    times, held = ([0.0, *itertools.accumulate(values)] for values in (costs, memory))
    faster = speeds or (1.0,) * num_stages

    def cost(index: int, start: int, stop: int) -> float:
        """The time of a stage; infinite where it does not fit."""
        if held[stop] - held[start] > limits[index]:
            return math.inf
        extra = ends[0] * (index == 0) + ends[1] * (index == num_stages - 1)
        return (times[stop] - times[start] + extra) / faster[index]

    slowest, _ = _best_split(cost, len(costs), num_stages, combine=max)
    if slowest == math.inf:
        raise ValueError(
            f"{len(costs)} layers that hold {held[-1]:g} in all cannot be split into {num_stages} stages that hold at "
            f"most {', '.join(f'{limit:g}' for limit in sorted(set(limits)))}: raise memory_limit, or use more stages."
        )

    def unevenness(index: int, start: int, stop: int) -> float:
        taken = cost(index, start, stop)
        return taken**2 if taken <= slowest else math.inf

    _, sizes = _best_split(unevenness, len(costs), num_stages, combine=lambda a, b: a + b)
    return sizes


def _best_split(
    cost: Callable[[int, int, int], float], num_layers: int, num_stages: int, combine: Callable[[float, float], float]
) -> tuple[float, tuple[int, ...]]:
    """The least combined cost of stages, and their sizes: of splits that cost the same, one with more layers in front.

    Args:
        cost: of the stage with a number, if it holds the layers from a first one to before another.
    """
    places = range(num_layers + 1)
    best = [cost(0, 0, stop) for stop in places]  # of the stages so far, if they hold the layers before `stop`
    starts: list[list[int]] = []
    for index in range(1, num_stages):
        before = best
        choices = [
            min((combine(before[start], cost(index, start, stop)), -start) for start in range(stop + 1))
            for stop in places
        ]
        best = [total for total, _ in choices]
        starts.append([-negative for _, negative in choices])
    sizes, stop = [], num_layers
    for start_of in reversed(starts):
        sizes.append(stop - start_of[stop])
        stop = start_of[stop]
    return best[-1], (stop, *reversed(sizes))
