"""The schedules. Each is a function of `pipe` (a `Verbs`): loops that call its methods, mostly by F, B, W and BW below.

The function is the only source of truth: training runs it, and plans, pictures and checks are made by running it on a
recorder. To add one, write the function, decorate it, draw its picture in tests/plan/test_schedules.py, and add its
note to docs/generate.py.

Comments name a phase as the papers' figures do: n(F B) is a loop that runs F and B n times, mF runs F for all m
microbatches, F1 is the F of chunk 1 (in plans and errors 2F1 is that of microbatch 1 on stage 2), F0B1 is an overlapped
pair. As in the papers, B is the whole backward, BW, where no W follows.

No schedule needs torch until a step runs.
"""

from __future__ import annotations

from typing import Any

from .calling import ForwardBackward, get_forward_backward_func, schedule
from .plan import Verbs, loop, v_shape

__all__ = [
    "BW",
    "B",
    "F",
    "ForwardBackward",
    "W",
    "forward_backward_gpipe",
    "forward_backward_looped_bfs",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_seq1f1b",
    "forward_backward_seq_interleaved_1f1b",
    "forward_inference",
    "get_forward_backward_func",
    "schedule",
]


# The actions, named as in the papers' figures. Each does nothing if its chunk has nothing left to do, so a loop may run
# past the last microbatch.


def F(pipe: Verbs, chunk: int = 0) -> None:
    """Run the forward of the chunk's next microbatch (or slice): receive its input, compute, send the output."""
    if pipe.num_forwards_left(chunk):
        pipe.recv_forward(chunk)
        pipe.forward_step(chunk)
        pipe.send_forward(chunk)


def B(pipe: Verbs, chunk: int = 0) -> None:
    """Run B, the input-gradient half of a backward, for the chunk's next microbatch (or slice). The other half, its
    weight gradients, becomes a pending W."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        pipe.recv_backward(chunk)
        pipe.backward_input_step(chunk)
        pipe.send_backward(chunk)
        limit_pending_weights(pipe)


def W(pipe: Verbs, chunk: int | None = None) -> None:
    """Run the oldest pending W of `chunk`, or of the rank if `chunk` is None.

    With `min_pending_weights` > 0, that many Ws are held back until the rank's last B; until then `chunk` is
    ignored."""
    least = pipe.settings.min_pending_weights
    if least and any(map(pipe.num_backwards_left, range(pipe.num_chunks))):
        if pipe.num_pending_weights() > least:
            pipe.backward_weight_step()
    elif pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def limit_pending_weights(pipe: Verbs) -> None:
    """Called after a B: run Ws until no more than `pending_weights_cap` of them are pending."""
    cap = pipe.settings.pending_weights_cap
    while cap is not None and pipe.num_pending_weights() > cap:
        pipe.backward_weight_step()


def finish_weights(pipe: Verbs, chunk: int) -> None:
    """Called before a BW where Ws may be pending: run those of this chunk, so that gradients are accumulated in the
    order of the microbatches."""
    while pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def BW(pipe: Verbs, chunk: int = 0) -> None:
    """Run the whole backward, B and W in one, of the chunk's next microbatch (or slice). Papers that do not split
    backwards call it B."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        if pipe.settings.min_pending_weights:
            finish_weights(pipe, chunk)
        pipe.recv_backward(chunk)
        pipe.backward_step(chunk)
        pipe.send_backward(chunk)


# Schedules that do not split the backward


@schedule("no_pipelining", placement=loop, num_chunks=None, max_pp_size=1)
def forward_backward_no_pipelining(pipe: Verbs) -> Any:
    """The whole model on one rank, microbatch by microbatch."""
    for _ in range(pipe.num_microbatches):
        for chunk in range(pipe.num_chunks):
            F(pipe, chunk)
        for chunk in reversed(range(pipe.num_chunks)):
            BW(pipe, chunk)

    return pipe.finish()


@schedule("inference", placement=loop, num_chunks=None, forward_only=True)
def forward_inference(pipe: Verbs) -> Any:
    """Forward only. With several chunks, `pp_size` microbatches go through all chunks before the next ones start."""
    for first in range(0, pipe.num_microbatches, pipe.pp_size):
        for chunk in range(pipe.num_chunks):
            for _ in range(first, min(first + pipe.pp_size, pipe.num_microbatches)):
                F(pipe, chunk)

    return pipe.finish()


@schedule("gpipe", placement=loop, num_chunks=1)
def forward_backward_gpipe(pipe: Verbs) -> Any:
    """GPipe: all forwards, then all backwards. https://arxiv.org/abs/1811.06965, Figure 2 (c)."""

    # mF: every microbatch is in flight.
    for _ in range(pipe.num_microbatches):
        F(pipe)

    # mB.
    for _ in range(pipe.num_microbatches):
        BW(pipe)

    return pipe.finish()


@schedule("1f1b", placement=loop, num_chunks=1)
def forward_backward_pipelining_without_interleaving(pipe: Verbs) -> Any:
    """1F1B (PipeDream-Flush). https://arxiv.org/abs/2104.04473, Figure 4 (top)."""
    num_later_ranks = pipe.pp_size - pipe.pp_rank - 1
    # If messages are slow, it pays to start with more microbatches than there are ranks after this one.
    num_extra = extra_units(pipe, default_in_flight=pipe.pp_size)
    num_warmup = min(num_later_ranks + min(num_extra, num_later_ranks), pipe.num_microbatches)

    # Warmup: nF. The last rank has none.
    for _ in range(num_warmup):
        F(pipe)

    # Steady state: n(F B). At most pp_size - pp_rank microbatches are in flight, or more if `max_in_flight` allows.
    for _ in range(pipe.num_microbatches - num_warmup):
        F(pipe)
        BW(pipe)

    # Cooldown: nB.
    for _ in range(num_warmup):
        BW(pipe)

    return pipe.finish()


@schedule("seq1f1b", placement=loop, num_chunks=1, slices=True)
def forward_backward_seq1f1b(pipe: Verbs) -> Any:
    """Seq1F1B: 1F1B with slices of sequences in place of microbatches. https://arxiv.org/abs/2406.03488, Figure 4."""
    num_later_ranks = pipe.pp_size - pipe.pp_rank - 1
    num_extra = extra_units(pipe, default_in_flight=pipe.pp_size)
    # The backward of a microbatch needs the forwards of all its slices, so all slices but the last are warmup too.
    num_warmup = min(num_later_ranks + min(num_extra, num_later_ranks) + pipe.num_slices - 1, pipe.num_units)

    # Warmup: nF. The last rank has all slices but one.
    for _ in range(num_warmup):
        F(pipe)

    # Steady state: n(F B). At most pp_size - pp_rank + num_slices - 1 slices are in flight, or more as above.
    for _ in range(pipe.num_units - num_warmup):
        F(pipe)
        BW(pipe)

    # Cooldown: nB.
    for _ in range(num_warmup):
        BW(pipe)

    return pipe.finish()


@schedule("looped_bfs", placement=loop, num_chunks=None, default_chunks=2)
def forward_backward_looped_bfs(pipe: Verbs) -> Any:
    """Breadth-first pipeline: GPipe on several chunks. https://arxiv.org/abs/2211.05953, Figure 2 (d)."""

    # mF0 mF1 ...: a chunk runs every microbatch before the next one begins.
    for chunk in range(pipe.num_chunks):
        for _ in range(pipe.num_microbatches):
            F(pipe, chunk)

    # ... mB1 mB0.
    for chunk in reversed(range(pipe.num_chunks)):
        for _ in range(pipe.num_microbatches):
            BW(pipe, chunk)

    return pipe.finish()


@schedule("interleaved_1f1b", placement=loop, num_chunks=None, default_chunks=2)
def forward_backward_pipelining_with_interleaving(pipe: Verbs) -> Any:
    """Interleaved 1F1B. https://arxiv.org/abs/2104.04473, Figure 4 (bottom). With one chunk it is 1F1B."""
    forwards, backwards, num_warmup = interleaved_order(pipe)
    num_steady = len(forwards) - num_warmup

    # Warmup: nF.
    for k in range(num_warmup):
        F(pipe, forwards[k])

    # Steady state: n(F B).
    for k in range(num_steady):
        F(pipe, forwards[num_warmup + k])
        BW(pipe, backwards[k])

    # Cooldown: nB.
    for k in range(num_steady, len(forwards)):
        BW(pipe, backwards[k])

    return pipe.finish()


@schedule("seq_interleaved_1f1b", placement=loop, num_chunks=None, default_chunks=2, slices=True)
def forward_backward_seq_interleaved_1f1b(pipe: Verbs) -> Any:
    """Seq1F1B-I: interleaved 1F1B with slices of sequences. https://arxiv.org/abs/2406.03488"""
    return forward_backward_pipelining_with_interleaving.loops(pipe)


# The zero-bubble schedules: B as early as it can be, W where a rank would otherwise wait.
#
# Sources: Zero Bubble Pipeline Parallelism (https://arxiv.org/abs/2401.10241), Pipeline Parallelism with Controllable
# Memory (https://arxiv.org/abs/2405.15362).


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
    # 1F1B's warmup is one F for each rank after this one. Of num_extra, rank r spends the part (p - 1 - r) / (p - 1) on
    # more warmup, which fills the time until its first B comes back. It keeps the rest, plus r, as pending Ws: work for
    # the time in which the ranks before it run their last Bs.
    extra_warmup = round(num_extra * (size - rank - 1) / max(1, size - 1))
    # All slices of the first microbatch but one go forward before its first B.
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

    The warmup has two more forwards for each later rank, as interleaved 1F1B's. If `max_in_flight` does not allow that,
    it has one more: then about as many microbatches are in flight as there are ranks, and the step is shorter than
    ZB-V's if messages are fast.
    """
    forwards, backwards, num_warmup = interleaved_order(pipe)
    # The first rank has two more warmup forwards for each rank before this one, and one F before its first B.
    limit, num_in_flight = pipe.settings.max_in_flight, num_warmup + 2 * pipe.pp_rank + 1
    if limit is not None and min(num_in_flight, len(forwards)) > limit * pipe.num_chunks + 1e-9:
        forwards, backwards, num_warmup = interleaved_order(pipe, num_per_rank=1)
    # One W per rank before this one: work for the time in which those ranks do their last Bs.
    num_deferred = pipe.pp_rank

    # Warmup: nF.
    for chunk in forwards[:num_warmup]:
        F(pipe, chunk)

    # Steady state: n(F B), n(F B W).
    for forward_chunk, backward_chunk in zip(forwards[num_warmup:], backwards):
        F(pipe, forward_chunk)
        B(pipe, backward_chunk)
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
    """Run the same block of six actions on each rank, and start it again for the next microbatch every six ticks.

    The block is F0 and F1 down and up the V, B1 and B0 down and up again, and two Ws in the ticks between. A microbatch
    holds memory from its F to its W, so slower hops mean more of it.

    Args:
        hops: ticks from one rank to the next, for each of F0, F1, B1, B0.
        turns: ticks from F0 to F1, from F1 to B1 and from B1 to B0, on the last rank (F0 to F1, B1 to B0) and on the
            first (F1 to B1). They are chosen so that no two of the four start on the same tick.
    """
    size, rank = pipe.pp_size, pipe.pp_rank
    down, up = rank, size - 1 - rank
    starts = []
    time = 0
    for hop, turn, place in zip(hops, (*turns, 0), (down, up, down, up)):
        starts.append(time + hop * place)
        time += hop * (size - 1) + turn
    assert len({start % 6 for start in starts}) == 4, "two actions of the block start on the same tick"

    # n(F0 F1 B1 B0 W W), in an order that depends on the rank.
    block = dict(zip(starts, ((F, 0), (F, 1), (B, 1), (B, 0))))
    for now in range(starts[-1] + 6 * pipe.num_microbatches):
        for start, (action, chunk) in block.items():
            if (now - start) % 6 == 0 and 0 <= now - start < 6 * pipe.num_microbatches:
                action(pipe, chunk)
                break
        else:
            W(pipe)

    # Cooldown: nW.
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()


# Schedules that overlap a forward and a backward in their steady state, so that each hides the other's communication.
#
# Sources: Megatron-LM's combined_1f1b.py (https://github.com/NVIDIA/Megatron-LM); DeepSeek-V3
# (https://arxiv.org/abs/2412.19437), https://github.com/deepseek-ai/DualPipe, and "DualPipe could be better without the
# Dual" by Sea AI Lab (https://hackmd.io/@ufotalent/r1lVXsa9Jg), which cuts it in half.


def pair(pipe: Verbs, forward_chunk: int, kind: str, backward_chunk: int) -> None:
    """Run F of one chunk and a backward of another, overlapped. `kind` is "B" or "BW"."""
    pipe.recompute_step(backward_chunk)
    if kind == "BW":
        finish_weights(pipe, backward_chunk)
    pipe.recv_forward(forward_chunk)
    pipe.recv_backward(backward_chunk)
    pipe.run_pair(("F", forward_chunk), (kind, backward_chunk))
    pipe.send_forward(forward_chunk)
    pipe.send_backward(backward_chunk)
    limit_pending_weights(pipe)


def combined_order(pipe: Verbs) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Returns the chunks of the warmup, of the pairs and of the cooldown.

    The order is that of `interleaved_order`, with one more forward in the warmup: both messages of a pair leave only
    when it ends, unless it runs in segments."""
    forwards, backwards, num_warmup = interleaved_order(pipe, num_more=1)
    num_pairs = len(forwards) - num_warmup
    return forwards[:num_warmup], list(zip(forwards[num_warmup:], backwards)), backwards[num_pairs:]


@schedule("combined_1f1b", placement=loop, num_chunks=None, default_chunks=2, min_chunks=2)
def forward_backward_combined_1f1b(pipe: Verbs) -> Any:
    """Interleaved 1F1B in pairs; on one rank 1F1B in pairs. https://github.com/NVIDIA/Megatron-LM"""
    warmup, pairs, cooldown = combined_order(pipe)

    # Warmup: nF.
    for chunk in warmup:
        F(pipe, chunk)

    # Steady state: n(FB).
    for forward_chunk, backward_chunk in pairs:
        pair(pipe, forward_chunk, "BW", backward_chunk)

    # Cooldown: nB.
    for chunk in cooldown:
        BW(pipe, chunk)

    return pipe.finish()


@schedule("combined_zb1p", placement=loop, num_chunks=None, default_chunks=2, min_chunks=2)
def forward_backward_combined_zb1p(pipe: Verbs) -> Any:
    """Combined 1F1B with its Ws deferred."""
    warmup, pairs, cooldown = combined_order(pipe)
    # One W per rank before this one: work for the time in which those ranks do their last Bs.
    num_deferred = pipe.pp_rank

    # Warmup: nF.
    for chunk in warmup:
        F(pipe, chunk)

    # Steady state: n(FB), n(FB W).
    for forward_chunk, backward_chunk in pairs:
        pair(pipe, forward_chunk, "B", backward_chunk)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)

    # Cooldown: n(B W), nW.
    for chunk in cooldown:
        B(pipe, chunk)
        if pipe.num_pending_weights() > num_deferred:
            W(pipe)
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()


def FB(pipe: Verbs, forward_chunk: int, backward_chunk: int) -> None:
    """Run F of one chunk and BW of another, overlapped. If one chunk has nothing left to do, run the other's alone."""
    if not (pipe.num_forwards_left(forward_chunk) and pipe.num_backwards_left(backward_chunk)):
        F(pipe, forward_chunk)
        BW(pipe, backward_chunk)
        return
    pair(pipe, forward_chunk, "BW", backward_chunk)


@schedule("dualpipev", placement=v_shape, num_chunks=2)
def forward_backward_dualpipev(pipe: Verbs) -> Any:
    """DualPipeV, for models whose communication inside a layer is long. https://github.com/deepseek-ai/DualPipe"""
    size, rank = pipe.pp_size, pipe.pp_rank

    # Phase 1: nF0.
    for _ in range(2 * (size - rank - 1)):
        F(pipe, 0)

    # Phase 2: n(F0 F1).
    for _ in range(rank + 1):
        F(pipe, 0)
        F(pipe, 1)

    # Phase 3: n(B1 W1 F1).
    for _ in range(size - rank - 1):
        B(pipe, 1)
        W(pipe)
        F(pipe, 1)

    # Phase 4, the steady state: n(F0B1 F1B0). The output of F0 and the input gradient of B1 stay on the last rank.
    # A pair starts when both of its messages have come. So the last rank runs its first F0 and B1 one after the other:
    # its next pair, F1B0, then ends sooner, and the rank before it gets both results of that sooner.
    for k in range(max(pipe.num_microbatches, 2 * size) - 2 * size + rank + 1):
        if k == 0 and rank == size - 1:
            F(pipe, 0)
            BW(pipe, 1)
        else:
            FB(pipe, 0, 1)
        FB(pipe, 1, 0)

    # Phase 5: n(B1 F1B0).
    for _ in range(size - rank - 1):
        BW(pipe, 1)
        FB(pipe, 1, 0)

    # Phase 6: n(B1 B0). The second half are Bs whose Ws stay pending.
    for k in range(rank + 1):
        (B if 2 * k > rank else BW)(pipe, 1)
        (B if 2 * k >= rank else BW)(pipe, 0)

    # Phase 7: n(W B0).
    for _ in range(size - rank - 1):
        W(pipe)
        B(pipe, 0)

    # Phase 8: nW.
    while pipe.num_pending_weights():
        W(pipe)

    return pipe.finish()


# The order of interleaved schedules, and how far a schedule starts ahead


def interleaved_order(pipe: Verbs, num_per_rank: int = 2, num_more: int = 0) -> tuple[list[int], list[int], int]:
    """The order of an interleaved schedule, as in Megatron-LM (get_schedule_table, get_pp_rank_microbatches). It counts
    in units: slices if sequences are cut, else microbatches.

    Args:
        num_per_rank: warmup forwards for each rank after this one.
        num_more: warmup forwards besides, on each rank.

    Returns:
        The chunk of each forward, the chunk of each backward, and the number of warmup forwards.
    """
    num_per_rank = min(num_per_rank, pipe.num_chunks)
    groups = [
        size * pipe.num_slices for size in _interleaved_groups(pipe, num_per_rank * (pipe.pp_size - 1) + num_more)
    ]
    # Each group of microbatches goes through one chunk after the other; backwards in the opposite order.
    forwards = [chunk for group in groups for chunk in range(pipe.num_chunks) for _ in range(group)]
    backwards = [pipe.num_chunks - 1 - chunk for chunk in forwards]
    # The first group has to reach the last chunk. Further forwards for each rank after this one fill the time in which
    # the first backward comes back through these ranks. That backward is of the last slice of the first microbatch, so
    # the other slices are warmup too.
    num_later_ranks = pipe.pp_size - pipe.pp_rank - 1
    num_warmup = (pipe.num_chunks - 1) * groups[0] + num_per_rank * num_later_ranks + num_more
    return forwards, backwards, min(num_warmup + pipe.num_slices - 1, len(forwards))


def _interleaved_groups(pipe: Verbs, num_ahead: int) -> list[int]:
    """Sizes of the groups of microbatches that go through a chunk together.

    If the group size is set, groups have it, as in Megatron; `_groups` says what becomes of the rest. If it is not,
    they are the smallest that work (ranks / slices, rounded up), or the largest that `max_in_flight` allows, since
    larger groups hide slow messages. If it allows none, there is one group of all.

    Args:
        num_ahead: the first rank's warmup forwards that are of no group of its own: for the ranks after it, and more.

    Raises:
        ValueError: the group size that is set is smaller than the smallest that works.
    """
    size, num_chunks, num_slices = pipe.pp_size, pipe.num_chunks, pipe.num_slices
    smallest = -(-size // num_slices)
    group_size = pipe.settings.microbatch_group_size
    if group_size is not None and group_size < smallest:
        cut = f", divided by {num_slices} slices" if num_slices > 1 else ""
        raise ValueError(
            f"microbatch_group_size_per_vp_stage must be at least the {size} ranks of the pipeline{cut}, got "
            f"{group_size}: with fewer, a chunk's first output comes back before the rank is ready for it, and ranks "
            "may wait for each other for ever. Use None for the smallest that works."
        )
    if group_size is not None or pipe.settings.max_in_flight is None or num_chunks == 1:
        return _groups(pipe.num_microbatches, group_size or smallest, smallest)
    # In flight on the first rank are its warmup and one more unit: (v - 1) * group * n + num_ahead + n, with n slices.
    most = int(pipe.settings.max_in_flight * num_chunks * num_slices + 1e-9)
    largest = max(smallest, (most - num_ahead - num_slices) // ((num_chunks - 1) * num_slices))
    choices = (_groups(pipe.num_microbatches, group_size, smallest) for group_size in range(largest, smallest - 1, -1))
    return next((groups for groups in choices if groups[0] <= largest), [pipe.num_microbatches])


def _groups(num_microbatches: int, group_size: int, smallest: int) -> list[int]:
    """Cut the microbatches into groups of `group_size`.

    A last group with fewer units than there are ranks comes back to the first rank too early, and ranks may wait for
    each other for ever. Megatron refuses such numbers. Here the microbatches of that last group are shared out over the
    other groups.
    """
    num_groups, remainder = divmod(num_microbatches, group_size)
    if num_groups == 0:
        return [remainder]
    if 0 < remainder < smallest:
        size, larger = divmod(num_microbatches, num_groups)
        return [size + 1] * larger + [size] * (num_groups - larger)
    return [group_size] * num_groups + [remainder] * (remainder > 0)


def extra_units(pipe: Verbs, default_in_flight: int) -> int:
    """How many units beyond `pp_size` a schedule with one chunk may have in flight. A unit is a microbatch, or a slice;
    the first microbatch's other slices (`num_slices - 1`) are not counted, since they are in flight in any case.

    Args:
        default_in_flight: how many units may be in flight, these left out, if `max_in_flight` is not set.

    More than 2 p - 1 units on p ranks do not help: the first microbatch is back by then. Never more than a step has.
    """
    limit, num_before = pipe.settings.max_in_flight, pipe.num_slices - 1
    most = default_in_flight if limit is None else int(limit * pipe.num_slices + 1e-9) - num_before
    return max(0, min(most, 2 * pipe.pp_size - 1, pipe.num_units - num_before) - pipe.pp_size)
