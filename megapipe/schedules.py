"""The schedules: one function each, whose loops are the schedule.

A schedule speaks the verbs of `Verbs` to the one object it is given, most of them through F, B, W and BW below. It is
the only source of truth: training runs it, and plans, pictures and checks are made by running it on a recorder. To add
one, write the function, decorate it, draw its picture in tests/plan/test_schedules.py, and add its note to
docs/generate.py.
"""

from __future__ import annotations

import os
from typing import Any

from . import parallel_state
from .plan import AnySchedule, Verbs, find_schedule, loop
from .runtime import ForwardBackward, schedule

__all__ = [
    "BW",
    "B",
    "F",
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
]

# What a schedule is made of, in the letters of the figures. Each does nothing where its chunk has nothing left to do,
# so a loop may run past the last microbatch.


def F(pipe: Verbs, chunk: int = 0) -> None:
    """Forward of the chunk's next microbatch, or slice of one."""
    if pipe.num_forwards_left(chunk):
        pipe.recv_forward(chunk)
        pipe.forward_step(chunk)
        pipe.send_forward(chunk)


def B(pipe: Verbs, chunk: int = 0) -> None:
    """Input gradient of the chunk's next microbatch or slice. Its weight-gradient pass (W) is deferred."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        pipe.recv_backward(chunk)
        pipe.backward_input_step(chunk)
        pipe.send_backward(chunk)
        limit_pending_weights(pipe)


def W(pipe: Verbs, chunk: int | None = None) -> None:
    """The weight-gradient pass deferred longest, of this chunk or of all. While backwards are left, as many stay
    pending as the setting `min_pending_weights` says, the youngest."""
    least = pipe.settings.min_pending_weights
    if least and any(map(pipe.num_backwards_left, range(pipe.num_chunks))):
        if pipe.num_pending_weights() > least:
            pipe.backward_weight_step()
    elif pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def limit_pending_weights(pipe: Verbs) -> None:
    """After a B: the Ws that are too many by the setting `max_pending_weights`."""
    most = pipe.settings.most_pending_weights
    while most is not None and pipe.num_pending_weights() > most:
        pipe.backward_weight_step()


def finish_weights(pipe: Verbs, chunk: int) -> None:
    """Before a BW: the Ws of this chunk that the setting `min_pending_weights` has left, for gradients are added up in
    the order of the microbatches."""
    while pipe.num_pending_weights(chunk):
        pipe.backward_weight_step(chunk)


def BW(pipe: Verbs, chunk: int = 0) -> None:
    """Whole backward of the chunk's next microbatch or slice: B and W in one. Figures that split no backward call it
    B."""
    if pipe.num_backwards_left(chunk):
        pipe.recompute_step(chunk)
        finish_weights(pipe, chunk)
        pipe.recv_backward(chunk)
        pipe.backward_step(chunk)
        pipe.send_backward(chunk)


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


def interleaved_order(pipe: Verbs, num_per_rank: int = 2) -> tuple[list[int], list[int], int]:
    """The order of an interleaved schedule, as in Megatron-LM (get_schedule_table, get_pp_rank_microbatches), of slices
    where sequences are cut.

    Args:
        num_per_rank: warmup forwards for each rank behind this one.

    Returns:
        The chunk of each forward, the chunk of each backward, and how many of the forwards are the warmup.
    """
    groups = [size * pipe.num_slices for size in _interleaved_groups(pipe)]
    # Each group of microbatches goes through one chunk after the other; backwards in the opposite order.
    forwards = [chunk for group in groups for chunk in range(pipe.num_chunks) for _ in range(group)]
    backwards = [pipe.num_chunks - 1 - chunk for chunk in forwards]
    # The first group has to reach the last chunk; then two more forwards for each rank behind this one, since the first
    # backward comes back through all of them; and it is that of the first microbatch's last slice.
    num_behind = pipe.pp_size - pipe.pp_rank - 1
    num_warmup = (pipe.num_chunks - 1) * groups[0] + min(pipe.num_chunks, num_per_rank) * num_behind
    return forwards, backwards, min(num_warmup + pipe.num_slices - 1, len(forwards))


def _interleaved_groups(pipe: Verbs) -> list[int]:
    """Sizes of the groups of microbatches that go through a chunk together.

    All have the group size that was set but the last, as in Megatron; without one they have a unit of work for each
    rank, or more where `max_in_flight` leaves room, since larger groups hide slow messages.

    Raises:
        ValueError: the group size is smaller than the pipeline.
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
    # In flight on the first rank are its warmup and one more: (v - 1) groups + 2 (p - 1) + n chunks.
    most = int(pipe.settings.max_in_flight * num_chunks * num_slices + 1e-9)
    largest = max(smallest, (most - 2 * (size - 1) - num_slices) // ((num_chunks - 1) * num_slices))
    choices = (_groups(pipe.num_microbatches, group_size, smallest) for group_size in range(largest, smallest - 1, -1))
    return next((groups for groups in choices if groups[0] <= largest), [pipe.num_microbatches])


def _groups(num_microbatches: int, group_size: int, smallest: int) -> list[int]:
    """Cut the microbatches into groups of `group_size`.

    A last group with fewer units of work than there are ranks comes back to the first rank too early, and ranks may
    wait for each other for ever. Megatron refuses such numbers; here all groups grow to take the remainder, the first
    ones by one more.
    """
    num_groups, remainder = divmod(num_microbatches, group_size)
    if num_groups == 0:
        return [remainder]
    if 0 < remainder < smallest:
        size, larger = divmod(num_microbatches, num_groups)
        return [size + 1] * larger + [size] * (num_groups - larger)
    return [group_size] * num_groups + [remainder] * (remainder > 0)


def extra_units(pipe: Verbs, default: int) -> int:
    """How many microbatches more than the pipeline has ranks a schedule with one chunk may have in flight. Of slices it
    is as many, besides those of the first microbatch, all but one of which are in flight before its first backward.

    The limit is the setting `max_in_flight`, or `default` without it. More than 2 p - 1 on p ranks help nothing: the
    first microbatch is back by then. Nor do more than there are.
    """
    limit, num_before = pipe.settings.max_in_flight, pipe.num_slices - 1
    most = default if limit is None else int(limit * pipe.num_slices) - num_before
    return max(0, min(most, 2 * pipe.pp_size - 1, pipe.num_units - num_before) - pipe.pp_size)


def get_forward_backward_func(
    name: AnySchedule | int | None = None,
    vp_size: int | None = None,
    schedule_pg_collection: Any = None,
    *,
    pp_size: int | None = None,
) -> ForwardBackward:
    """The function that runs one step of a schedule: forward and backward of all microbatches.

    Args:
        name: one of the schedules' names, or a plan to run: a `Plan`, or a path to a file of one (.json, .csv, .txt;
            see `megapipe.plan.find_schedule`). None takes the environment variable MEGAPIPE_SCHEDULE, and without it
            what Megatron would take: no_pipelining on one rank, else interleaved_1f1b with virtual stages and 1f1b
            without. A number is Megatron's first argument, `pp_size`.
        pp_size, vp_size: pipeline ranks and virtual stages to choose by, as in Megatron: where both are None they come
            from `parallel_state`, else each is taken as it is.
        schedule_pg_collection: the groups, as in Megatron, which looks only for pipelines of several models in it.

    Raises:
        ValueError: there is no schedule of that name, a file holds no plan, or the groups are those of several models.
        ScheduleError: the plan cannot run.
        TypeError: `pp_size` is given twice.
    """
    for check in parallel_state.check_groups:
        check(schedule_pg_collection)
    if isinstance(name, int):
        if pp_size is not None:
            raise TypeError(f"pp_size is given twice, as {name} and as {pp_size}: give it once.")
        name, pp_size = None, name
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
    return ForwardBackward.of(find_schedule(name))
