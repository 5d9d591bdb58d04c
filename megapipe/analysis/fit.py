"""Which ways of training a decoder fit into the memory of so many devices, and how long a step of each takes by its
plan.

Times follow from what the caller gives: the FLOP/s of a device, the share of them that a stage reaches, and bandwidths.
Nothing here was measured on a device. What is not hidden counts in full: collectives of tensor-parallel ranks, of
experts, of context (https://arxiv.org/abs/2205.05198, section 4.2.2), messages of the pipeline, and gradients and
weights between replicas behind the last backward. What is left out: the optimizer's own time, the host, uneven experts,
and hops between switches.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..layouts import distribute_layers, fastest, shortest
from ..plan import Costs, Plan, Settings, StageBytes, StageInfo, find_schedule, make_plan, simulate
from .fit_job import Job, Layout
from .progress import doing
from .transformer import LayerCosts

SCHEDULES = ("1f1b", "interleaved_1f1b")
SPLIT_SCHEDULES = ("zb1p", "interleaved_zb1p", "zbv", "v_half", "v_min")
"""Those that are tried: the others hold more for no less time, or gain where something is overlapped."""

CHUNKS = (2, 4)
MICROBATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Estimate:
    """What a layout takes.

    Attributes:
        sizes: layers of each stage.
        step: seconds.
        ranks: the peak bytes of each pipeline rank, and their parts.
        shares: the step by what it goes to: work, recomputation, tensor (with experts and context), bubble, replicas.
        tflops: operations of the model a second and device, in 10^12, with nothing that is computed twice.
    """

    layout: Layout
    sizes: Sequence[int]
    step: float
    ranks: list[tuple[float, dict[str, float]]]
    shares: dict[str, float]
    tflops: float

    @property
    def peak(self) -> float:
        """The bytes of the fullest rank."""
        return max(peak for peak, _ in self.ranks)

    @property
    def limit(self) -> str:
        """What takes most of the step beside the work."""
        lost = {name: share for name, share in self.shares.items() if name != "work"}
        name = max(lost, key=lost.__getitem__)
        return f"{name} {lost[name]:.0%}" if lost[name] > 0.005 else "work"


def fit(
    job: Job, *, top: int = 10, cp: int = 1, may_split: bool = True, own: Mapping[str, int] | None = None
) -> tuple[list[Estimate], Estimate | None]:
    """The fastest layouts that fit, best first; where none does, the one that needs least.

    Args:
        top: how many.
        cp: devices that share the tokens of a sequence.
        may_split: layers defer their weight gradients, so that schedules with W by itself can be used.
        own: sizes that all of them have, by their names in `Layout`: those of a layout of one's own.

    Raises:
        ValueError: the devices or the batch cannot be shared out, or not as `own` says.
    """
    own = own or {}
    layouts = sorted(
        ((_least_time(job, layout), layout) for layout in _layouts(job, cp, may_split, own)),
        key=lambda item: (item[0], item[1].activations != "kept", item[1]),
    )
    if not layouts:
        sizes = ", ".join(f"{name} {size}" for name, size in {"cp": cp, **own}.items())
        raise ValueError(
            f"{job.devices} devices and {job.batch} sequences a step cannot be shared out ({sizes}): the batch is a "
            "multiple of the replicas and their microbatches, the heads are one of tp, the experts and the replicas of "
            "ep, tp lies in a node, and each stage has a layer."
        )
    found: dict[object, Estimate] = {}
    fitting: set[Layout] = set()
    for number, (least, layout) in enumerate(layouts):
        doing(f"{number:,} of {len(layouts):,} layouts tried, {len(found)} kinds fit")
        if len(found) >= top and least >= sorted(one.step for one in found.values())[top - 1]:
            break
        if layout._replace(activations="kept") in fitting:
            continue  # nothing else is faster than what is kept
        if not job.is_uneven and _least_bytes(job, layout) > job.rooms(1)[0]:
            continue
        try:
            one = estimate(job, layout)
        except ValueError:  # no layers of any size fit
            continue
        if all(peak <= room for (peak, _), room in zip(one.ranks, job.rooms(layout.pp))):
            fitting.add(layout)
            # Of those that differ in chunks, microbatches and activations only, the best.
            alike = layout[:6]
            found[alike] = min((found.get(alike, one), one), key=_quality)
    if found:
        return sorted(found.values(), key=_quality)[:top], None
    if job.is_uneven:
        raise ValueError("nothing fits, however layers are shared out. Take more devices, or shorter sequences.")
    _, least_bytes = min((_least_bytes(job, layout), layout) for _, layout in layouts)
    return [], estimate(job, least_bytes)


def _quality(one: Estimate) -> tuple[float, float]:
    return round(one.step, 9), one.peak


def _layouts(job: Job, cp: int, may_split: bool, own: Mapping[str, int]) -> Iterator[Layout]:
    model = job.model

    def sizes(name: str, usual: Iterable[int]) -> list[int]:
        """Those that are tried: the caller's own, or the usual ones."""
        return [own[name]] if name in own else [*usual]

    number = len(model.layers)
    for tp, pp in itertools.product(sizes("tp", (1, 2, 4, 8, 16)), sizes("pp", range(1, number + 1))):
        dp = job.devices // (tp * pp * cp)
        if tp > job.node or model.heads % tp or dp * tp * pp * cp != job.devices or job.batch % dp:
            continue
        eps = [n for n in sizes("ep", range(1, max(1, model.experts) + 1)) if dp % n == (model.experts or 1) % n == 0]
        for ep, microbatch, activations in itertools.product(
            eps, sizes("microbatch", MICROBATCHES), _activations(job, pp)
        ):
            if job.batch // dp % microbatch == 0:
                for name, chunks in _schedules(pp, number, may_split, own.get("chunks")):
                    yield Layout(pp, dp, tp, cp, ep, name, chunks, microbatch, activations)


def _activations(job: Job, pp: int) -> list[str]:
    """What may become of them. On one rank each B follows its F, so there is nothing to recompute before it, or to
    move."""
    return ["kept", "checkpointed"] + ["recomputed"] * (pp > 1) + ["offloaded"] * (pp > 1 and job.host_bandwidth > 0)


def _schedules(pp: int, layers: int, may_split: bool, own_chunks: int | None) -> Iterator[tuple[str, int]]:
    if pp == 1:
        if own_chunks in (None, 1):
            yield "no_pipelining", 1
        return
    for name in SCHEDULES + SPLIT_SCHEDULES * may_split:
        fixed = find_schedule(name).num_chunks
        for chunks in [fixed] if fixed else [n for n in {*CHUNKS, own_chunks or 2} if n > 1]:
            if pp * chunks <= layers and own_chunks in (None, chunks):
                yield name, chunks


def _sizes(job: Job, layout: Layout) -> list[int]:
    """The layers of each stage: the last one has fewer, for the time of the head, and slow ranks have."""
    model, num_stages = job.model, layout.pp * layout.chunks
    number = len(model.layers)
    head = model.head_operations() / model.whole.operations(job.sequence) * number
    if job.is_uneven:
        speeds = tuple(_per_stage(layout, job.speeds_of(layout.pp)))
        nothing = (0.0,) * number
        return [*fastest((1.0,) * number, num_stages, (0, head), nothing, (1.0,) * num_stages, speeds=speeds)]
    stages = [StageInfo(index, num_stages) for index in range(num_stages)]
    for post in (min(round(head), number // num_stages - 1), 0):
        try:
            sizes = [len(distribute_layers(number, stage, num_virtual_layers_post=post)) for stage in stages]
        except ValueError:
            continue
        if min(sizes) > 0:
            return sizes
    raise AssertionError(f"{number} layers in {num_stages} stages")


class StageTimes(NamedTuple):
    """Seconds of a microbatch on one stage."""

    forward: float
    backward_input: float
    backward_weight: float
    work: float
    """The part of these three that is neither collectives nor computed again."""
    recomputed: float
    """The part of B that computes layers again; or the R."""
    collectives: float
    """The part of F and B."""


def _times(job: Job, layout: Layout, sizes: Sequence[int]) -> list[StageTimes]:
    """Those of all stages, by their layers."""
    stages = job.model.stages(sizes)
    return [_times_of(job, layout, stage, size, stage is stages[-1]) for stage, size in zip(stages, sizes)]


def _times_of(job: Job, layout: Layout, stage: LayerCosts, layers: int, is_last: bool) -> StageTimes:
    tp, cp, ep = layout.tp, layout.cp, layout.ep
    tokens = layout.microbatch * job.sequence / cp
    per_token = tokens / tp / job.flops / job.efficiency
    slower = job.efficiency / (job.expert_efficiency or job.efficiency)
    products = 2 * (stage.products * (job.flops / (job.fp8_flops or job.flops)) + stage.routed * slower) * per_token
    scores, head = stage.scores(job.sequence) * per_token, is_last * job.model.head_operations() * per_token
    is_checkpointed = layout.activations == "checkpointed"
    again = is_checkpointed * (products + scores)
    hidden = job.model.boundary() * tokens
    tensor = layers * 4 * hidden * (tp - 1) / tp / job.node_bandwidth
    sent = 2 * stage.choices * hidden / tp * (ep - 1) / ep
    experts = sent / (job.node_bandwidth if tp * ep <= job.node else job.bandwidth)
    context = 2 * stage.keys * tokens / tp * (cp - 1) / job.bandwidth
    collectives = tensor + experts + context
    forward = products + scores + head + collectives
    return StageTimes(
        forward,
        products + 2 * scores + head + again + collectives * (1 + is_checkpointed),
        products + head,
        3 * (products + scores + head),
        forward if layout.activations == "recomputed" else again,
        collectives * (2 + is_checkpointed),
    )


def _of_ranks(layout: Layout, per_stage: Sequence[float]) -> list[float]:
    placement = find_schedule(layout.schedule).placement
    sums = [0.0] * layout.pp
    for stage, number in enumerate(per_stage):
        sums[placement.rank(stage, layout.pp)] += number
    return sums


def _per_stage(layout: Layout, per_rank: Sequence[float]) -> list[float]:
    placement = find_schedule(layout.schedule).placement
    return [per_rank[placement.rank(stage, layout.pp)] for stage in range(layout.pp * layout.chunks)]


def _least_time(job: Job, layout: Layout) -> float:
    """A bound below the step: a rank works for all microbatches, from when the first one has come through the stages
    before it."""
    times = _times(job, layout, _sizes(job, layout))
    num_microbatches = job.batch // layout.dp // layout.microbatch
    own = _of_ranks(layout, [sum(time[:3]) for time in times])
    work = [time / speed for time, speed in zip(own, job.speeds_of(layout.pp))]
    if job.is_uneven:
        return num_microbatches * max(work)
    starts = itertools.accumulate((time.forward for time in times), initial=0.0)
    return max(start + num_microbatches * own for start, own in zip(starts, work))


def _weights(job: Job, layout: Layout, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """The weights of each stage on a device: those of experts, and all others."""
    model, last = job.model, len(sizes) - 1
    weights = []
    for index, stage in enumerate(model.stages(sizes)):
        has_head = index == last and not (model.tied and last == 0)
        other = stage.weights + (index == 0) * model.before + has_head * model.head
        weights.append((stage.experts / layout.tp / layout.ep, other / layout.tp))
    return weights


def _model_bytes(job: Job, layout: Layout, sizes: Sequence[int]) -> list[float]:
    replicas = layout.dp * layout.cp
    kept = job.weight + job.gradient
    return [
        experts * (kept + job.optimizer * layout.ep / replicas) + other * (kept + job.optimizer / replicas)
        for experts, other in _weights(job, layout, sizes)
    ]


def _least_bytes(job: Job, layout: Layout) -> float:
    """A bound below the peak: the model of a rank, and a microbatch on the smallest stage."""
    sizes = _sizes(job, layout)
    saved = stage_bytes(job, layout, sizes).saved
    assert isinstance(saved, list)
    return max(_of_ranks(layout, _model_bytes(job, layout, sizes))) + float(min(saved))


def stage_bytes(job: Job, layout: Layout, sizes: Sequence[int]) -> StageBytes:
    """The bytes of each stage by formula, with sequence parallelism beside tensor parallelism."""
    model, last = job.model, len(sizes) - 1
    tokens = layout.microbatch * job.sequence / layout.cp / layout.tp
    head = [(index == last) * model.logits() * tokens for index in range(last + 1)]
    whole = [stage.saved * tokens for stage in model.stages(sizes)]
    largest = max(layer.saved for layer in model.layers) * tokens
    inputs = [layers * model.boundary() * tokens for layers in sizes]
    splits, is_checkpointed = layout.schedule in SPLIT_SCHEDULES, layout.activations == "checkpointed"
    return StageBytes(
        saved=[a + b for a, b in zip(inputs if is_checkpointed else whole, head)],
        kept=[a + b for a, b in zip(whole if splits or not is_checkpointed else inputs, head)],
        model=_model_bytes(job, layout, sizes),
        message=[model.boundary() * tokens] * last + [0.0],
        # A layer that is computed again, or the gradients of its largest inner values; those of logits.
        backward_input=[max(largest / (1 if is_checkpointed else 2), size) for size in head],
        backward_weight=[0.0] * len(sizes),
    )


@functools.lru_cache(maxsize=256)
def _kept_plan(schedule: str, pp: int, num_microbatches: int, chunks: int, recompute: bool) -> Plan:
    return make_plan(schedule, pp, num_microbatches, chunks, settings=Settings(recompute=recompute))


def _plan(job: Job, layout: Layout, num_microbatches: int, costs: Costs) -> Plan:
    sizes = (layout.schedule, layout.pp, num_microbatches, layout.chunks)
    if layout.activations != "offloaded":
        return _kept_plan(*sizes, layout.activations == "recomputed")
    assert costs.memory is not None
    saved, forward = costs.memory.saved, costs.forward
    assert isinstance(saved, Sequence)
    assert isinstance(forward, Sequence)
    copying = max(size / job.host_bandwidth / time for size, time in zip(saved, forward) if time)
    return make_plan(*sizes, settings=Settings(offload=copying), costs=costs)


def estimate(job: Job, layout: Layout) -> Estimate:
    """The time and the bytes of a layout by its plan. Of many microbatches the steady phase is played in part: behind 4
    for each rank, further ones take as long as the last of these, but no less than the slowest rank works for them."""
    sizes = _sizes(job, layout)
    num_microbatches = job.batch // layout.dp // layout.microbatch
    extra = max(0, num_microbatches - 4 * layout.pp) // layout.pp * layout.pp
    played = num_microbatches - extra
    message = job.model.boundary() * layout.microbatch * job.sequence / layout.cp / layout.tp
    link = job.node_bandwidth if layout.tp * layout.cp * layout.pp <= job.node else job.bandwidth
    speeds = job.speeds_of(layout.pp)

    def costs_of(sizes: Sequence[int]) -> Costs:
        forward, inputs, weights = map(list, [*zip(*_times(job, layout, sizes))][:3])
        memory = stage_bytes(job, layout, sizes)
        return Costs(forward, inputs, weights, p2p=message / link, memory=memory, speeds=speeds)

    planned = costs_of(sizes)
    plan = _plan(job, layout, played, planned)
    if job.is_uneven:
        sizes = shortest(plan, sizes, costs_of, job.rooms(layout.pp))
    times = _times(job, layout, sizes)
    simulation = simulate(plan, costs_of(sizes))
    recomputed = [num_microbatches * time.recomputed * (layout.activations == "checkpointed") for time in times]
    for action in itertools.chain.from_iterable(plan.recomputed):
        recomputed[action.stage] += num_microbatches / played * times[action.stage].recomputed
    rs = [time / num_microbatches * (layout.activations == "recomputed") for time in recomputed]
    work = _of_ranks(layout, [sum(time[:3]) + r for time, r in zip(times, rs)])
    makespan = simulation.makespan
    if extra:
        before = _plan(job, layout, played - layout.pp, planned)
        last = makespan - simulate(before, costs_of(sizes)).makespan
        slowest = max(time / speed for time, speed in zip(work, speeds))
        makespan += extra * max(last / layout.pp, slowest)
    replicas = _time_of_replicas(job, layout, sizes)
    step = makespan + replicas
    operations = job.model.operations(job.sequence) * job.batch * job.sequence
    shares = {
        "work": num_microbatches * sum(time.work for time in times) / sum(speeds) / step,
        "recomputation": sum(recomputed) / layout.pp / step,
        "collectives": num_microbatches * sum(time.collectives for time in times) / layout.pp / step,
        "replicas": replicas / step,
    }
    shares["bubble"] = max(0.0, 1 - sum(shares.values()))
    ranks = [(rank.peak, rank.parts) for rank in simulation.memory or ()]
    return Estimate(layout, sizes, step, ranks, shares, operations / step / job.devices / 1e12)


def _time_of_replicas(job: Job, layout: Layout, sizes: Sequence[int]) -> float:
    """Gradients are reduced and scattered, weights gathered: of the rank that has most."""
    replicas = layout.dp * layout.cp
    link = job.node_bandwidth if job.devices <= job.node else job.bandwidth
    moved = (job.gradient + job.weight) / link

    def seconds(weights: float, sharing: int) -> float:
        return weights * moved * (sharing - 1) / sharing

    stages = _weights(job, layout, sizes)
    return max(_of_ranks(layout, [seconds(e, replicas // layout.ep) + seconds(o, replicas) for e, o in stages]))
