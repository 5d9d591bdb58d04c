"""Microbatches of sequences of many lengths: as many tokens in each as fit, and about as much to compute."""

from __future__ import annotations

import math
from collections.abc import Sequence


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    num_microbatches: int | None = None,
    *,
    num_replicas: int = 1,
    hidden_size: int = 4096,
) -> list[list[int]]:
    """Which sequences go into which microbatch, so that all microbatches take about as long. No rank need be asked: all
    that are given the same find the same.

    A sequence takes as long as it has tokens, and longer for attention, which looks at all before each token.

    Args:
        lengths: of the sequences of a step, in tokens: those of all replicas.
        max_tokens: of one microbatch.
        num_microbatches: of each replica. None takes as few as have room.
        num_replicas: each gets as many microbatches. Replica r's are `pack(...)[r::num_replicas]`.
        hidden_size: of the model: attention weighs the less, the wider the layers are.

    Returns:
        The numbers of the sequences in each microbatch, the shortest microbatches first and last, as they fill and
        drain a pipeline. Pack them one behind the other, or pad them.

    Raises:
        ValueError: a sequence has more than `max_tokens`, there are fewer sequences than microbatches, or
            `num_microbatches` have no room for all.
    """
    if not lengths or min(lengths) < 1 or max(lengths) > max_tokens:
        found_lengths = f"have {min(lengths)} to {max(lengths)}" if lengths else "are none"
        raise ValueError(
            f"sequences to be packed have 1 to max_tokens={max_tokens} tokens, but these {found_lengths}: cut longer "
            "ones, or give more room."
        )
    costs = [length * (12 * hidden_size + length) for length in lengths]  # of a layer, but for a factor
    least = math.ceil(sum(lengths) / max_tokens / num_replicas)
    wanted = range(least, len(lengths) // num_replicas + 1) if num_microbatches is None else [num_microbatches]
    for number in wanted:
        found = _share_out(costs, lengths, max_tokens, number * num_replicas)
        if found is not None and all(found):
            by_replica = _share_out_evenly(found, costs, num_replicas, number)
            ordered = [_order(one, costs) for one in by_replica]
            return [microbatch for same in zip(*ordered) for microbatch in same]
    raise ValueError(
        f"{len(lengths)} sequences with {sum(lengths)} tokens cannot be shared out over {num_replicas} replicas with "
        f"{num_microbatches or 'the same number of'} microbatches each, of 1 to {max_tokens} tokens: give more "
        "sequences, or another num_microbatches or max_tokens."
    )


def _share_out(costs: Sequence[int], lengths: Sequence[int], max_tokens: int, number: int) -> list[list[int]] | None:
    """The most expensive first, each to whom has least so far, and room. None where there is no room."""
    found: list[list[int]] = [[] for _ in range(number)]
    spent, tokens = [0] * number, [0] * number
    for sequence in sorted(range(len(costs)), key=lambda one: -costs[one]):
        free = [one for one in range(number) if tokens[one] + lengths[sequence] <= max_tokens]
        if not free:
            return None
        least = min(free, key=lambda one: spent[one])
        found[least].append(sequence)
        spent[least] += costs[sequence]
        tokens[least] += lengths[sequence]
    return found


def _share_out_evenly(
    microbatches: list[list[int]], costs: Sequence[int], num_replicas: int, number: int
) -> list[list[list[int]]]:
    """Give each replica as many microbatches, and about as much in all."""
    of_all = [sum(costs[one] for one in microbatch) for microbatch in microbatches]
    shares = _share_out(of_all, [1] * len(of_all), number, num_replicas)
    assert shares is not None
    return [[microbatches[one] for one in share] for share in shares]


def _order(microbatches: list[list[int]], costs: Sequence[int]) -> list[list[int]]:
    """The shortest first and last: what fills and drains a pipeline takes the least time. Within a microbatch sequences
    stay as they came."""
    rising = sorted((sorted(one) for one in microbatches), key=lambda one: sum(costs[sequence] for sequence in one))
    return [*rising[::2], *rising[1::2][::-1]]
