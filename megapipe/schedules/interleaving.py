"""The order of interleaved schedules, and how far a schedule starts ahead."""

from __future__ import annotations

from ..plan import Verbs

__all__ = ["extra_units", "interleaved_order"]


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
