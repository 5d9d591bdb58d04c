"""The zero-bubble schedules: B as early as it can be, W where a rank would otherwise wait.

Sources: Zero Bubble Pipeline Parallelism (https://arxiv.org/abs/2401.10241) and Pipeline Parallelism with Controllable
Memory (https://arxiv.org/abs/2405.15362).
"""

from __future__ import annotations

from typing import Any

from ..plan import Verbs, loop, v_shape
from .calling import schedule
from .interleaving import extra_units, interleaved_order
from .letters import B, F, W

__all__ = [
    "forward_backward_interleaved_zb1p",
    "forward_backward_seq_zb1p",
    "forward_backward_v_half",
    "forward_backward_v_min",
    "forward_backward_zb1p",
    "forward_backward_zb2p",
    "forward_backward_zbv",
]


@schedule("zb1p", placement=loop, num_chunks=1)
def forward_backward_zb1p(pipe: Verbs) -> Any:
    """ZB-H1: the memory of 1F1B. https://arxiv.org/abs/2401.10241, Figure 3 (top)."""
    return _one_chunk(pipe, num_extra=extra_units(pipe, pipe.pp_size))


@schedule("zb2p", placement=loop, num_chunks=1)
def forward_backward_zb2p(pipe: Verbs) -> Any:
    """ZB-H2: no bubble between a rank's first and last action, for almost twice the memory of 1F1B.
    https://arxiv.org/abs/2401.10241, Figure 3 (bottom)."""
    return _one_chunk(pipe, num_extra=extra_units(pipe, 2 * pipe.pp_size - 1))


@schedule("seq_zb1p", placement=loop, num_chunks=1, slices=True)
def forward_backward_seq_zb1p(pipe: Verbs) -> Any:
    """ZB-H1 with slices of sequences in place of whole ones. https://arxiv.org/abs/2406.03488"""
    return _one_chunk(pipe, num_extra=extra_units(pipe, pipe.pp_size))


def _one_chunk(pipe: Verbs, num_extra: int) -> Any:
    size, rank = pipe.pp_size, pipe.pp_rank
    # 1F1B's warmup is one F for each rank behind this one. Twice that lasts until the first B: the first rank gets all
    # of num_extra for it, the last rank none. The rest of num_extra are Ws deferred to the end, in which earlier ranks
    # do their last Bs.
    extra_warmup = round(num_extra * (size - rank - 1) / max(1, size - 1))
    # Of the first microbatch's slices all but one come before its first B.
    num_warmup = size - rank - 1 + extra_warmup + pipe.num_slices - 1
    num_deferred = rank + num_extra - extra_warmup

    # Warmup: nF.
    for _ in range(min(num_warmup, pipe.num_units)):
        F(pipe)

    # Steady state: n(F B), n(F B W).
    while pipe.num_forwards_left():
        F(pipe)
        B(pipe)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)

    # Cooldown: n(B W), nW.
    while pipe.num_backwards_left():
        B(pipe)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()


@schedule("interleaved_zb1p", placement=loop, num_chunks=None, default_chunks=2)
def forward_backward_interleaved_zb1p(pipe: Verbs) -> Any:
    """Interleaved 1F1B with its Ws deferred. With one chunk it is ZB-H1.

    Where `max_in_flight` is too small for two warmup forwards per rank, there is one: as many microbatches in flight as
    ranks, and a step that is shorter than ZB-V's for as long as messages are fast.
    """
    forwards, backwards, num_warmup = interleaved_order(pipe)
    limit, num_in_flight = pipe.settings.max_in_flight, num_warmup + 2 * pipe.pp_rank + 1  # on the first rank
    if limit is not None and min(num_in_flight, len(forwards)) > limit * pipe.num_chunks + 1e-9:
        forwards, backwards, num_warmup = interleaved_order(pipe, num_per_rank=1)
    # One W per rank before this one: work for the time in which those ranks do their last Bs.
    num_deferred = pipe.pp_rank

    # Warmup: nF.
    for chunk in forwards[:num_warmup]:
        F(pipe, chunk)

    # Steady state: n(F B), n(F B W).
    for chunk, last_chunk in zip(forwards[num_warmup:], backwards):
        F(pipe, chunk)
        B(pipe, last_chunk)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)

    # Cooldown: n(B W), nW.
    for chunk in backwards[len(forwards) - num_warmup :]:
        B(pipe, chunk)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()


@schedule("zbv", placement=v_shape, num_chunks=2)
def forward_backward_zbv(pipe: Verbs) -> Any:
    """ZB-V. https://arxiv.org/abs/2405.15362, Figure 5."""
    size, rank = pipe.pp_size, pipe.pp_rank

    # Warmup: nF0, n(F1 F0), n(F1 B1 W1).
    for _ in range(2 * (size - rank) - 1):
        F(pipe, 0)
    for _ in range(rank):
        F(pipe, 1)
        F(pipe, 0)
    for _ in range(size - rank):
        F(pipe, 1)
        B(pipe, 1)
        W(pipe, 1)

    # Steady state: n(F0 B0 W0 F1 B1 W1).
    for _ in range(max(pipe.num_microbatches, 2 * size - 1) - size):
        F(pipe, 0)
        B(pipe, 0)
        W(pipe, 0)
        F(pipe, 1)
        B(pipe, 1)
        W(pipe, 1)

    # Cooldown: n(B0 B1), n(B0 W0), nW1, nW0.
    for _ in range(rank):
        B(pipe, 0)
        B(pipe, 1)
    for _ in range(size - rank):
        B(pipe, 0)
        W(pipe, 0)
    while pipe.num_pending_weights(1):
        W(pipe, 1)
    while pipe.num_pending_weights(0):
        W(pipe, 0)

    return pipe.finish()


@schedule("v_half", placement=v_shape, num_chunks=2)
def forward_backward_v_half(pipe: Verbs) -> Any:
    """V-Half: half of 1F1B's memory. https://arxiv.org/abs/2405.15362, Figure 4 (c)."""
    # Of all turns up to 6 that fit together on 2 to 8 ranks, those of the smallest peak, and then the shortest plan.
    turns = (2, 1, 1) if pipe.pp_size % 2 else (4, 1, 5)
    return _repeated_block(pipe, hops=(1, 2, 1, 2), turns=turns)


@schedule("v_min", placement=v_shape, num_chunks=2)
def forward_backward_v_min(pipe: Verbs) -> Any:
    """V-Min: a third of 1F1B's memory. https://arxiv.org/abs/2405.15362, Figure 4 (b)."""
    # As in https://github.com/sail-sg/zero-bubble-pipeline-parallelism (zbv_greedy.py, stable_pattern_v_min).
    turns = (1, 3, 1) if pipe.pp_size % 3 == 0 else (1, 1, 1)
    return _repeated_block(pipe, hops=(1, 1, 1, 1), turns=turns)


def _repeated_block(pipe: Verbs, hops: tuple[int, int, int, int], turns: tuple[int, int, int]) -> Any:
    """The same block of six actions on each rank, begun again for the next microbatch every six units of time.

    The block is F0 and F1 down and up the V, B1 and B0 down and up again, and two Ws where there is room. A microbatch
    holds memory from its F to its B, so slower hops mean more of it.

    Args:
        hops: units of time from one rank to the next, for each of F0, F1, B1, B0.
        turns: units from each of the first three to the one after it, on the rank where the V turns; so many that no
            two of the four ever fall on the same unit.
    """
    size, rank = pipe.pp_size, pipe.pp_rank
    down, up = rank, size - 1 - rank
    starts = []
    time = 0
    for hop, turn, place in zip(hops, (*turns, 0), (down, up, down, up)):
        starts.append(time + hop * place)
        time += hop * (size - 1) + turn
    assert len({start % 6 for start in starts}) == 4, "two actions of the block fall on the same unit of time"

    # n(F0 F1 B1 B0 W W), in an order that depends on the rank.
    block = dict(zip(starts, ((F, 0), (F, 1), (B, 1), (B, 0))))
    for now in range(starts[-1] + 6 * pipe.num_microbatches):
        for start, (step, chunk) in block.items():
            if (now - start) % 6 == 0 and 0 <= now - start < 6 * pipe.num_microbatches:
                step(pipe, chunk)
                break
        else:
            W(pipe)

    # Cooldown: nW.
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()
