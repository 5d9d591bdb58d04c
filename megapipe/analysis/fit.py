"""`megapipe fit`: which ways of training a decoder fit into the memory of so many devices, and how long a step of each
takes by its plan.

Times follow from what the caller gives: the FLOP/s of a device, the share of them that a stage reaches, and bandwidths.
Nothing here was measured on a device. What is not hidden counts in full: collectives of tensor-parallel ranks, of
experts, of context (https://arxiv.org/abs/2205.05198, section 4.2.2), messages of the pipeline, and gradients and
weights between replicas behind the last backward. What is left out: the optimizer's own time, the host, uneven experts,
and hops between switches.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ..layouts import distribute_layers
from ..plan import Costs, Plan, Settings, StageBytes, StageInfo, find_schedule, make_plan, simulate
from .arguments import parse_bytes
from .text import bytes_in_words, print_table, say
from .transformer import Transformer, model_of

__all__ = ["Estimate", "Job", "Layout", "Transformer", "estimate", "fit", "fit_command"]

SPLIT_SCHEDULES = ("zb1p", "interleaved_zb1p", "zbv", "v_half", "v_min")
SCHEDULES = ("1f1b", "interleaved_1f1b", *SPLIT_SCHEDULES)
"""Those that are tried: the others hold more for no less time, or gain where something is overlapped."""

CHUNKS = (2, 4)
MICROBATCHES = (1, 2, 4, 8, 16)
GIVEN = ("sequence", "batch", "devices", "flops", "efficiency", "node", "reserve")
SIZES = ("memory", "node_bandwidth", "bandwidth", "host_bandwidth")
"""What the command takes of a job: numbers, and bytes."""


@dataclass(frozen=True)
class Job:
    """What is trained, and on what.

    Attributes:
        sequence: tokens of one.
        batch: sequences of a step, over all replicas.
        devices: how many there are; `node` of them are connected at `node_bandwidth`, all others at `bandwidth`.
        memory: bytes of one.
        flops: operations a second of one.
        efficiency: the share of them that the products of a stage reach.
        node_bandwidth, bandwidth: bytes a second of one device, one way.
        host_bandwidth: the same between a device and its host's memory; 0 where activations stay on the device.
        weight, gradient, optimizer: bytes of each weight, of its gradient, and of its optimizer state: in mixed
            precision 2, 4, and 12 for Adam. The optimizer state is shared out over replicas.
        reserve: the share of the memory that nothing is planned for: the context, communicators, fragments.
    """

    model: Transformer
    sequence: int
    batch: int
    devices: int
    memory: float
    flops: float
    efficiency: float
    node: int = 8
    node_bandwidth: float = float("inf")
    bandwidth: float = float("inf")
    host_bandwidth: float = 0.0
    weight: float = 2.0
    gradient: float = 4.0
    optimizer: float = 12.0
    reserve: float = 0.1

    def __post_init__(self) -> None:
        for name in ("sequence", "batch", "devices", "memory", "flops", "node", "node_bandwidth", "bandwidth"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(self, name):g}.")
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency is a share, more than 0 and at most 1, got {self.efficiency:g}.")
        if not 0 <= self.reserve < 1:
            raise ValueError(f"reserve is a share, from 0 on and less than 1, got {self.reserve:g}.")

    @property
    def room(self) -> float:
        """The bytes of a device that may be planned for."""
        return self.memory * (1 - self.reserve)


class Layout(NamedTuple):
    """One way of training: pipeline, data, tensor, context and expert parallelism (`ep` of the `dp` replicas share the
    experts), a schedule with its microbatches, and what becomes of activations.

    `activations` is "kept"; "checkpointed", where each layer keeps its input, and its B begins with it; or "offloaded"
    (`config.offload_activations`).
    """

    pp: int
    dp: int
    tp: int
    cp: int
    ep: int
    schedule: str
    chunks: int
    microbatch: int
    activations: str

    def of_ranks(self, per_stage: Sequence[float]) -> list[float]:
        """The sum over the stages of each pipeline rank."""
        placement = find_schedule(self.schedule).placement
        sums = [0.0] * self.pp
        for stage, number in enumerate(per_stage):
            sums[placement.rank(stage, self.pp)] += number
        return sums


class StageTimes(NamedTuple):
    """Seconds of a microbatch on one stage."""

    forward: float
    backward_input: float
    backward_weight: float
    recomputed: float
    """The part of B that computes layers again."""
    collectives: float
    """The part of F and B."""


@dataclass(frozen=True)
class Estimate:
    """What a layout takes.

    Attributes:
        step: seconds.
        ranks: the peak bytes of each pipeline rank, and their parts.
        shares: the step by what it goes to: work, recomputation, collectives, bubble, replicas.
        tflops: operations of the model a second and device, in 10^12, with nothing that is computed twice.
    """

    layout: Layout
    step: float
    ranks: list[tuple[float, dict[str, float]]]
    shares: dict[str, float]
    tflops: float

    @property
    def peak(self) -> float:
        """The bytes of the fullest rank."""
        return max(peak for peak, _ in self.ranks)

    @property
    def quality(self) -> tuple[float, float]:
        """The less, the better."""
        return round(self.step, 9), self.peak


def fit(job: Job, *, top: int = 10, cp: int = 1, may_split: bool = True) -> list[Estimate]:
    """The fastest layouts that fit, best first. Where none does, the one that needs least, which is above `job.room`.

    Args:
        top: how many.
        cp: devices that share the tokens of a sequence.
        may_split: layers defer their weight gradients, so that schedules with W by itself can be used.

    Raises:
        ValueError: the devices or the batch cannot be shared out.
    """
    layouts = [(*_bounds(job, layout), layout) for layout in _layouts(job, cp, may_split)]
    if not layouts:
        raise ValueError(
            f"{job.devices} devices and {job.batch} sequences a step cannot be shared out (context parallelism {cp}): "
            "the batch must be a multiple of the replicas."
        )
    found: dict[object, Estimate] = {}
    fitting: set[Layout] = set()
    for least, least_bytes, layout in sorted(layouts, key=lambda one: (one[0], one[2].activations != "kept", one[2])):
        if len(found) >= top and least >= sorted(one.step for one in found.values())[top - 1]:
            break
        if layout._replace(activations="kept") in fitting or least_bytes > job.room:
            continue  # nothing else is faster than what is kept
        if (one := estimate(job, layout)).peak <= job.room:
            fitting.add(layout)
            # Of those that differ in chunks, microbatches and activations only, the best.
            alike = layout[:6]
            found[alike] = min(found.get(alike, one), one, key=lambda one: one.quality)
    smallest = min(layouts, key=lambda one: one[1:])[-1]
    return sorted(found.values(), key=lambda one: one.quality)[:top] or [estimate(job, smallest)]


def _layouts(job: Job, cp: int, may_split: bool) -> Iterator[Layout]:
    model = job.model
    for tp in (1, 2, 4, 8, 16):
        if tp > job.node or model.heads % tp or (model.kv_heads or 0) % tp or job.devices % (tp * cp):
            continue
        left = job.devices // tp // cp
        for pp in range(1, min(left, model.layers) + 1):
            dp = left // pp
            if left % pp or job.batch % dp:
                continue
            # On one rank each B follows its F, so there is nothing to move.
            activations = ["kept", "checkpointed"] + ["offloaded"] * (pp > 1 and job.host_bandwidth > 0)
            shares = [n for n in range(1, dp + 1) if dp % n == 0 and model.experts % n == 0] if model.experts else [1]
            sizes = [size for size in MICROBATCHES if job.batch // dp % size == 0]
            for ep, size, kept in itertools.product(shares, sizes, activations):
                for schedule, chunks in _schedules(pp, model.layers, may_split):
                    yield Layout(pp, dp, tp, cp, ep, schedule, chunks, size, kept)


def _schedules(pp: int, layers: int, may_split: bool) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "no_pipelining", 1
        return
    for name in SCHEDULES:
        fixed = find_schedule(name).num_chunks
        for chunks in CHUNKS if fixed is None else [fixed]:
            if pp * chunks <= layers and (may_split or name not in SPLIT_SCHEDULES):
                yield name, chunks


def _sizes(job: Job, layout: Layout) -> list[int]:
    """The layers of each stage: the last one has fewer, for the time of the head."""
    model, num_stages = job.model, layout.pp * layout.chunks
    head = model.head() / (model.products() + model.scores(job.sequence))
    stages = [StageInfo(index, num_stages) for index in range(num_stages)]
    post = min(round(head), model.layers // num_stages - 1)
    return [len(distribute_layers(model.layers, stage, num_virtual_layers_post=post)) for stage in stages]


def _times(job: Job, layout: Layout, sizes: Sequence[int]) -> list[StageTimes]:
    """The times of each stage."""
    model, tp, cp, ep = job.model, layout.tp, layout.cp, layout.ep
    tokens = layout.microbatch * job.sequence / cp
    rate = job.flops * job.efficiency * tp / tokens
    products, scores = model.products() / rate, model.scores(job.sequence) / rate
    is_checkpointed = layout.activations == "checkpointed"
    hidden = model.boundary() * tokens
    tensor = 4 * hidden * (tp - 1) / tp / job.node_bandwidth
    sent = 2 * max(1, model.experts_per_token) * hidden / tp * (ep - 1) / ep
    experts = sent / (job.node_bandwidth if tp * ep <= job.node else job.bandwidth)
    context = 4 * model.kv_size * tokens / tp * (cp - 1) / job.bandwidth

    def of_stage(layers: int, head: float) -> StageTimes:
        again = is_checkpointed * layers * (products + scores)
        collectives = layers * (tensor + experts + context)
        return StageTimes(
            layers * (products + scores) + head + collectives,
            layers * (products + 2 * scores) + head + again + collectives * (1 + is_checkpointed),
            layers * products + head,
            again,
            collectives * (2 + is_checkpointed),
        )

    return [of_stage(layers, 0.0) for layers in sizes[:-1]] + [of_stage(sizes[-1], model.head() / rate)]


def _weights(job: Job, layout: Layout, sizes: Sequence[int]) -> list[tuple[float, float]]:
    """The weights of each stage on a device: those of experts, and all others."""
    model, last = job.model, len(sizes) - 1
    weights = []
    for index, layers in enumerate(sizes):
        tables = (index == 0) + (index == last and not (model.tied and last == 0))
        other = layers * model.other_weights + tables * model.table_weights
        weights.append((layers * model.expert_weights / layout.tp / layout.ep, other / layout.tp))
    return weights


def stage_bytes(job: Job, layout: Layout, sizes: Sequence[int]) -> StageBytes:
    """The bytes of each stage by formula, with sequence parallelism beside tensor parallelism."""
    model, last, replicas = job.model, len(sizes) - 1, layout.dp * layout.cp
    tokens = layout.microbatch * job.sequence / layout.cp / layout.tp
    head = [(index == last) * model.logits() * tokens for index in range(last + 1)]
    whole = [layers * model.saved() * tokens for layers in sizes]
    inputs = [layers * model.boundary() * tokens for layers in sizes]
    splits, is_checkpointed = layout.schedule in SPLIT_SCHEDULES, layout.activations == "checkpointed"
    kept = job.weight + job.gradient
    return StageBytes(
        saved=[a + b for a, b in zip(inputs if is_checkpointed else whole, head)],
        kept=[a + b for a, b in zip(whole if splits or not is_checkpointed else inputs, head)],
        model=[
            experts * (kept + job.optimizer * layout.ep / replicas) + other * (kept + job.optimizer / replicas)
            for experts, other in _weights(job, layout, sizes)
        ],
        message=[model.boundary() * tokens] * last + [0.0],
        # A layer that is computed again, or the gradients of its largest inner values; those of logits.
        backward_input=[max(tokens * model.saved() / (1 if is_checkpointed else 2), size) for size in head],
        backward_weight=[0.0] * len(sizes),
    )


def _bounds(job: Job, layout: Layout) -> tuple[float, float]:
    """Less than the step takes, and less than its peak: a rank works for all microbatches, from when the first one has
    come through the stages before it, and holds its model, and a microbatch on the smallest stage."""
    sizes = _sizes(job, layout)
    times, memory = _times(job, layout, sizes), stage_bytes(job, layout, sizes)
    assert isinstance(memory.saved, list)
    assert isinstance(memory.model, list)
    num_microbatches = job.batch // layout.dp // layout.microbatch
    work = layout.of_ranks([sum(time[:3]) for time in times])
    starts = itertools.accumulate((time.forward for time in times), initial=0.0)
    step = max(start + num_microbatches * own for start, own in zip(starts, work))
    return step, max(layout.of_ranks(memory.model)) + min(memory.saved)


_kept_plan = functools.lru_cache(maxsize=256)(make_plan)


def _plan(job: Job, layout: Layout, num_microbatches: int, costs: Costs) -> Plan:
    sizes = (layout.schedule, layout.pp, num_microbatches, layout.chunks)
    if layout.activations != "offloaded":
        return _kept_plan(*sizes)
    assert costs.memory is not None
    saved, forward = costs.memory.saved, costs.forward
    assert isinstance(saved, list)
    assert isinstance(forward, list)
    copying = max(size / job.host_bandwidth / time for size, time in zip(saved, forward))
    return make_plan(*sizes, settings=Settings(offload=copying), costs=costs)


def estimate(job: Job, layout: Layout) -> Estimate:
    """The time and the bytes of a layout by its plan. Of many microbatches the steady phase is played in part: behind 4
    for each rank every further one takes as long as the slowest rank works for it."""
    sizes = _sizes(job, layout)
    times = _times(job, layout, sizes)
    num_microbatches = job.batch // layout.dp // layout.microbatch
    extra = max(0, num_microbatches - 4 * layout.pp) // layout.pp * layout.pp
    played = num_microbatches - extra
    message = job.model.boundary() * layout.microbatch * job.sequence / layout.cp / layout.tp
    link = job.node_bandwidth if layout.tp * layout.cp * layout.pp <= job.node else job.bandwidth
    forward, inputs, weights = ([time[part] for time in times] for part in range(3))
    costs = Costs(forward, inputs, weights, p2p=message / link, memory=stage_bytes(job, layout, sizes))
    simulation = simulate(_plan(job, layout, played, costs), costs)
    slowest = max(layout.of_ranks([sum(time[:3]) for time in times]))
    replicas = _time_of_replicas(job, layout, sizes)
    step = simulation.makespan + extra * slowest + replicas
    operations = job.model.operations(job.sequence) * job.batch * job.sequence
    shares = {
        "work": operations / (job.devices * job.flops * job.efficiency) / step,
        "recomputation": num_microbatches * sum(time.recomputed for time in times) / layout.pp / step,
        "collectives": num_microbatches * sum(time.collectives for time in times) / layout.pp / step,
        "replicas": replicas / step,
    }
    shares["bubble"] = max(0.0, 1 - sum(shares.values()))
    ranks = [(rank.peak, rank.parts) for rank in simulation.memory or ()]
    return Estimate(layout, step, ranks, shares, operations / step / job.devices / 1e12)


def _time_of_replicas(job: Job, layout: Layout, sizes: Sequence[int]) -> float:
    """Gradients are reduced and scattered, weights gathered: of the rank that has most."""
    replicas = layout.dp * layout.cp
    link = job.node_bandwidth if job.devices <= job.node else job.bandwidth
    moved = (job.gradient + job.weight) / link
    of_experts, of_others = (moved * (sharing - 1) / sharing for sharing in (replicas // layout.ep, replicas))
    weights = _weights(job, layout, sizes)
    return max(layout.of_ranks([experts * of_experts + others * of_others for experts, others in weights]))


# The command


def fit_command(args: argparse.Namespace) -> None:
    given: dict[str, Any] = {name: getattr(args, name) for name in GIVEN}
    sizes: dict[str, Any] = {name: parse_bytes(size) for name in SIZES if (size := getattr(args, name))}
    job = Job(_model_of(args.model), **given, **sizes)
    say(
        f"model: {job.model.weights / 1e9:.3g} billion weights; {job.batch * job.sequence:,} tokens a step on "
        f"{job.devices} devices, {1 - job.reserve:.0%} of {args.memory} planned for"
    )
    found = fit(job, top=args.top, cp=args.cp, may_split=not args.unsplit)
    layouts, best = [one.layout for one in found], found[0]
    if best.peak > job.room:
        pp, dp, tp, _, ep, schedule, chunks, _, activations = best.layout
        raise ValueError(
            f"nothing fits: the smallest way found holds {_parts(best)} (pp {pp}, dp {dp}, tp {tp}, ep {ep}, "
            f"{schedule} x{chunks}, activations {activations}). Take more devices, shorter sequences, or --cp."
        )
    columns = {
        **{name: [str(getattr(layout, name)) for layout in layouts] for name in ("pp", "dp", "tp", "ep")},
        "schedule": [layout.schedule + f" x{layout.chunks}" * (layout.chunks > 1) for layout in layouts],
        "microbatch": [str(layout.microbatch) for layout in layouts],
        "activations": [layout.activations for layout in layouts],
        "bytes": [bytes_in_words(one.peak) for one in found],
        "step": [f"{one.step:.3g} s" for one in found],
        "TFLOP/s": [f"{one.tflops:.0f}" for one in found],
        "most of the rest": [_most_of_the_rest(one) for one in found],
    }
    print_table(columns, ("schedule", "most of the rest"), may_go=("microbatch", "TFLOP/s", "most of the rest", "ep"))
    shares = " + ".join(f"{share:.0%} {name}" for name, share in best.shares.items() if share > 0.005)
    say(f"fastest: {_parts(best)}; the step is {shares}")
    say("bytes: of the fullest rank; TFLOP/s: of the model and a device, by formula and plan, not measured")


def _model_of(given: list[str]) -> Transformer:
    """The model of a file, or of NAME=NUMBER each."""
    where = " ".join(given) or "nothing"
    try:
        if len(given) == 1 and "=" not in where:
            return model_of(json.loads(Path(where).read_text()), where)
        return model_of({name: json.loads(text) for name, _, text in (pair.partition("=") for pair in given)}, where)
    except (json.JSONDecodeError, TypeError):
        raise ValueError(f"{where} is no config.json of Hugging Face, and no numbers NAME=NUMBER.") from None


def _most_of_the_rest(one: Estimate) -> str:
    share, name = max((share, name) for name, share in one.shares.items() if name != "work")
    return f"{name} {share:.0%}" if share > 0.005 else "work"


def _parts(one: Estimate) -> str:
    peak, parts = max(one.ranks, key=lambda rank: rank[0])
    return f"{bytes_in_words(peak)} = " + " + ".join(f"{bytes_in_words(size)} {name}" for name, size in parts.items())
