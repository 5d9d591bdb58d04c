"""Schedules of papers: none of them is in the package. Each says what it was compared with."""

from __future__ import annotations

import functools
from typing import Any

from megapipe import schedule
from megapipe.plan import Placement, Verbs, loop, v_shape
from megapipe.schedules import BW, B, F, W


@schedule("eager_1f1b", placement=loop)
def eager_1f1b(pipe: Verbs) -> Any:
    """Eager-1F1B (https://arxiv.org/abs/2211.05322): 1F1B that runs twice as far ahead, so that forward messages are
    hidden. As alpa's OverlapFriendlyPipeDreamSchedule: 2 (p - r) - 1 forwards first on rank r."""
    num_warmup = min(2 * (pipe.pp_size - pipe.pp_rank - 1) + 1, pipe.num_microbatches)
    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        BW(pipe)
        F(pipe)
    return pipe.finish()


@schedule("2bp_gpipe", placement=loop)
def two_bp_gpipe(pipe: Verbs) -> Any:
    """2BP on GPipe (https://arxiv.org/abs/2405.18047, figure 1): all weight gradients when the last input gradient is
    sent. As `train_step` in a public implementation has it, which computes them in one go, by W here."""
    for step in (F, B):
        for _ in range(pipe.num_microbatches):
            step(pipe)
    return all_weights(pipe)


@schedule("2bp_1f1b_1", placement=loop)
def two_bp_1f1b_1(pipe: Verbs) -> Any:
    """2BP on 1F1B, "1f1b-1" of that code and figure, where there are as many microbatches as ranks: all weight
    gradients at the end, where 1F1B waits."""
    num_warmup = min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches)
    for _ in range(num_warmup):
        F(pipe)
    for _ in range(pipe.num_microbatches):
        F(pipe)
        B(pipe)
    return all_weights(pipe)


def all_weights(pipe: Verbs) -> Any:
    while pipe.num_pending_weights():
        W(pipe)
    return pipe.finish()


@schedule("ooo_modulo", placement=loop, num_chunks=None, default_chunks=2)
def ooo_modulo(pipe: Verbs) -> Any:
    """Out-of-order backprop in a pipeline (https://dl.acm.org/doi/10.1145/3492321.3519563): layers are dealt out in
    turn, and each gradient is sent on before the weight gradient is computed. As the "modulo" of the authors'
    schedule.py: a W comes behind the sending of its B, before the next B of its stage, and before the Bs of the stage
    that is next on its rank."""
    for chunk in range(pipe.num_chunks):
        for _ in range(pipe.num_microbatches):
            F(pipe, chunk)
    for chunk in reversed(range(pipe.num_chunks)):
        for _ in range(pipe.num_microbatches):
            B(pipe, chunk)
            W(pipe)
    return pipe.finish()


@schedule("terapipe", placement=loop, slices=True)
def terapipe(pipe: Verbs) -> Any:
    """TeraPipe (https://arxiv.org/abs/2102.07988): GPipe with slices of sequences. As the authors' terapipe.py, but for
    the order of microbatches backward: there the last one is the first, as its last slice is here, too."""
    for _ in range(pipe.num_units):
        F(pipe)
    for _ in range(pipe.num_units):
        BW(pipe)
    return pipe.finish()


@schedule("llama3_interleaved", placement=loop, num_chunks=2)
def llama3_interleaved(pipe: Verbs) -> Any:
    """Llama 3 (https://arxiv.org/abs/2407.21783, section 3.3.2 and figure 6): interleaved, with any number N of
    microbatches in a round: 5 on 4 ranks. The text says no more of the order."""
    group = pipe.pp_size + 1  # N, which is the number of ranks elsewhere
    if pipe.num_microbatches > group and pipe.num_microbatches % group:
        raise ValueError(f"rounds have {group} microbatches, and the last one would have fewer")
    return rounds_of(pipe, group)


def rounds_of(pipe: Verbs, group: int) -> Any:
    order = [
        chunk
        for first in range(0, pipe.num_microbatches, group)
        for chunk in range(2)
        for _ in range(first, min(first + group, pipe.num_microbatches))
    ]
    num_warmup = 2 * (pipe.pp_size - pipe.pp_rank - 1) + group
    for step, chunk in enumerate(order):
        F(pipe, chunk)
        if step >= num_warmup:
            BW(pipe, 1 - order[step - num_warmup])
    for chunk in order[-num_warmup:] if len(order) > num_warmup else order:
        BW(pipe, 1 - chunk)
    return pipe.finish()


def by_wave(pipe: Verbs) -> Any:
    """What has come furthest goes first, and backward before forward."""
    for kind, chunk in _waves(pipe.placement, pipe.pp_size, pipe.num_microbatches, pipe.num_chunks)[pipe.pp_rank]:
        (F if kind == "F" else BW)(pipe, chunk)
    return pipe.finish()


@functools.cache
def _waves(placement: Placement, pp_size: int, num_microbatches: int, num_chunks: int) -> list[list[tuple[str, int]]]:
    """The order of each rank, found by playing all of them: an F takes one unit of time, a B two."""
    last = pp_size * num_chunks - 1
    there = {("F", 0, m): 0 for m in range(num_microbatches)}  # when an action may begin
    free, order = [0] * pp_size, [list[tuple[str, int]]() for _ in range(pp_size)]
    now = 0
    while there:
        for rank in range(pp_size):
            ready = [one for one, time in there.items() if time <= now and placement.rank(one[1], pp_size) == rank]
            if free[rank] > now or not ready:
                continue
            kind, stage, m = min(ready, key=lambda one: (one[0], -one[1] if one[0] == "F" else one[1], one[2]))
            del there[kind, stage, m]
            free[rank] = now + (1 if kind == "F" else 2)
            order[rank].append((kind, stage // pp_size))
            if kind == "F":
                there["F" if stage < last else "B", min(stage + 1, last), m] = free[rank]
            elif stage:
                there["B", stage - 1, m] = free[rank]
        now += 1
    return order


schedule("hanayo_1_wave", placement=v_shape, num_chunks=2)(by_wave)
"""Hanayo (https://arxiv.org/abs/2308.15762): microbatches go down and up again, in W = stages / (2 ranks) waves. The
order is that of `by_wave`, which was not compared with the figures action by action."""

schedule("hanayo_2_waves", placement=v_shape, num_chunks=4)(by_wave)

PAPERS = ("eager_1f1b", "2bp_gpipe", "2bp_1f1b_1", "ooo_modulo", "terapipe", "llama3_interleaved")
PAPERS += ("hanayo_1_wave", "hanayo_2_waves")
