"""The schedules: one function each, whose loops are the schedule.

A schedule speaks the verbs of `Verbs` to the one object it is given. It is the only source of truth: training runs
it, and plans, pictures and checks are made by running it on a recorder. To add one, write the function, decorate it,
draw its picture in tests/test_schedules.py, and add its row to the README's table.
"""

from __future__ import annotations

import os
from typing import Any

from . import parallel_state
from .placement import loop
from .registry import find_schedule
from .step import ForwardBackward, schedule
from .verbs import Verbs

__all__ = [
    "forward_backward_gpipe",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_inference",
    "get_forward_backward_func",
]


@schedule("no_pipelining", placement=loop, num_chunks=None, max_pp_size=1)
def forward_backward_no_pipelining(pipe: Verbs) -> Any:
    """The whole model on one rank, microbatch by microbatch."""
    for _ in range(pipe.num_microbatches):
        for chunk in range(pipe.num_chunks):
            pipe.recv_forward(chunk)
            pipe.forward_step(chunk)
            pipe.send_forward(chunk)
        for chunk in reversed(range(pipe.num_chunks)):
            pipe.recv_backward(chunk)
            pipe.backward_step(chunk)
            pipe.send_backward(chunk)

    return pipe.finish()


@schedule("inference", placement=loop, num_chunks=None, forward_only=True)
def forward_inference(pipe: Verbs) -> Any:
    """Forward only. With several chunks, as many microbatches as there are ranks go round at a time."""
    for first in range(0, pipe.num_microbatches, pipe.pp_size):
        for chunk in range(pipe.num_chunks):
            for _ in range(first, min(first + pipe.pp_size, pipe.num_microbatches)):
                pipe.recv_forward(chunk)
                pipe.forward_step(chunk)
                pipe.send_forward(chunk)

    return pipe.finish()


@schedule("gpipe", placement=loop, num_chunks=1)
def forward_backward_gpipe(pipe: Verbs) -> Any:
    """GPipe: all forwards, then all backwards. https://arxiv.org/abs/1811.06965, Figure 2 (c)."""

    def F() -> None:
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()

    def B() -> None:
        pipe.recv_backward()
        pipe.backward_step()
        pipe.send_backward()

    # mF: every microbatch is in flight.
    for _ in range(pipe.num_microbatches):
        F()

    # mB.
    for _ in range(pipe.num_microbatches):
        B()

    return pipe.finish()


@schedule("1f1b", placement=loop, num_chunks=1)
def forward_backward_pipelining_without_interleaving(pipe: Verbs) -> Any:
    """1F1B (PipeDream-Flush). https://arxiv.org/abs/2104.04473, Figure 4 (top)."""
    num_warmup = min(pipe.pp_size - pipe.pp_rank - 1, pipe.num_microbatches)

    def F() -> None:
        pipe.recv_forward()
        pipe.forward_step()
        pipe.send_forward()

    def B() -> None:
        pipe.recv_backward()
        pipe.backward_step()
        pipe.send_backward()

    # Warmup: nF. The last rank has none.
    for _ in range(num_warmup):
        F()

    # Steady state: n(F B). At most pp_size - pp_rank microbatches are in flight.
    for _ in range(pipe.num_microbatches - num_warmup):
        F()
        B()

    # Cooldown: nB.
    for _ in range(num_warmup):
        B()

    return pipe.finish()


def get_forward_backward_func(
    name: str | None = None, *, pp_size: int | None = None, vp_size: int | None = None
) -> ForwardBackward:
    """The function that runs one step of a schedule: forward and backward of all microbatches.

    Args:
        name: one of the schedules' names. None takes the environment variable MEGAPIPE_SCHEDULE, and without it what
            Megatron would take: no_pipelining on one rank, else interleaved_1f1b with virtual stages and 1f1b without.
        pp_size, vp_size: pipeline ranks and virtual stages to choose by, as in Megatron: where both are None they come
            from `parallel_state`, else each is taken as it is.

    Raises ValueError on an unknown name.
    """
    if name is None:
        name = os.environ.get("MEGAPIPE_SCHEDULE")
    if name is None:
        if pp_size is None and vp_size is None:
            pp_size = parallel_state.get_pipeline_model_parallel_world_size()
            vp_size = parallel_state.get_virtual_pipeline_model_parallel_world_size()
        if (pp_size or 1) == 1:
            name = "no_pipelining"
        else:
            name = "1f1b" if vp_size is None else "interleaved_1f1b"
    found = find_schedule(name)
    assert isinstance(found, ForwardBackward)
    return found
