"""Schedules whose backwards are whole."""

from __future__ import annotations

from typing import Any

from ..plan import Verbs, loop
from .calling import schedule
from .interleaving import extra_units, interleaved_order
from .letters import BW, F

__all__ = [
    "forward_backward_gpipe",
    "forward_backward_looped_bfs",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_seq1f1b",
    "forward_backward_seq_interleaved_1f1b",
    "forward_inference",
]


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
    """Forward only. With several chunks, as many microbatches as there are ranks go round at a time."""
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
    num_behind = pipe.pp_size - pipe.pp_rank - 1
    # With slow messages it pays to start with more microbatches than there are ranks behind.
    num_extra = extra_units(pipe, default=pipe.pp_size)
    num_warmup = min(num_behind + min(num_extra, num_behind), pipe.num_microbatches)

    # Warmup: nF. The last rank has none.
    for _ in range(num_warmup):
        F(pipe)

    # Steady state: n(F B). At most pp_size - pp_rank microbatches are in flight.
    for _ in range(pipe.num_microbatches - num_warmup):
        F(pipe)
        BW(pipe)

    # Cooldown: nB.
    for _ in range(num_warmup):
        BW(pipe)

    return pipe.finish()


@schedule("seq1f1b", placement=loop, num_chunks=1, slices=True)
def forward_backward_seq1f1b(pipe: Verbs) -> Any:
    """Seq1F1B: 1F1B with slices of sequences in place of whole ones. https://arxiv.org/abs/2406.03488, Figure 4."""
    num_behind = pipe.pp_size - pipe.pp_rank - 1
    num_extra = extra_units(pipe, default=pipe.pp_size)
    # A microbatch goes backward when all of its slices have gone forward: those but the last are warmup too.
    num_warmup = min(num_behind + min(num_extra, num_behind) + pipe.num_slices - 1, pipe.num_units)

    # Warmup: nF. The last rank has all slices but one.
    for _ in range(num_warmup):
        F(pipe)

    # Steady state: n(F B). At most pp_size - pp_rank + num_slices - 1 slices are in flight.
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
