"""Interleaved schedules whose steady state is pairs, so that forwards and backwards hide each other's communication.

Source: Megatron-LM's combined_1f1b.py (https://github.com/NVIDIA/Megatron-LM).
"""

from __future__ import annotations

from typing import Any

from ..plan import Verbs, loop
from .calling import schedule
from .interleaving import interleaved_order
from .letters import BW, B, F, W, finish_weights, limit_pending_weights

__all__ = ["forward_backward_combined_1f1b", "forward_backward_combined_zb1p"]


def pair(pipe: Verbs, forward_chunk: int, kind: str, backward_chunk: int) -> None:
    """F of one chunk and a backward of another, "B" or the whole "BW", overlapped."""
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
    """The chunks of the warmup, of the pairs and of the cooldown: those of `interleaved_order`, and one more forward in
    the warmup, since both messages of a pair leave at its end."""
    forwards, backwards, num_warmup = interleaved_order(pipe)
    num_warmup = min(num_warmup + 1, len(forwards))
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
