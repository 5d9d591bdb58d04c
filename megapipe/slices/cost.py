"""Where to cut a sequence so that its slices cost the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

__all__ = ["equal_cost"]


def equal_cost(
    seq_length: int,
    num_slices: int,
    hidden_size: int,
    ffn_hidden_size: int | None = None,
    *,
    window: int | None = None,
    multiple_of: int = 1,
) -> list[int]:
    """Lengths of slices that cost the same: with causal attention, positions cost the more the later they are.

    A position's forward through a layer of hidden size h with an MLP of size f takes 8 h^2 + 4 h f operations in its
    matrix products, and 4 h for each position that its attention sees; its backward takes twice that. The number of
    layers does not matter. This is the computation-wise partition of Seq1F1B (https://arxiv.org/abs/2406.03488).

    Args:
        seq_length: positions of a sequence.
        num_slices: into how many parts it is cut.
        hidden_size: of the model.
        ffn_hidden_size: of a position's MLP, or of its experts together; half as much again where it is gated (three
            matrices). Default: 4 times hidden_size.
        window: how many positions each sees, itself included (sliding window attention). Default: all before it.
        multiple_of: divides every length, as kernels or shards of the sequence want it.

    Returns:
        `num_slices` lengths, the longest first, of `seq_length` in all. The dearest slice is as cheap as can be.

    Raises:
        ValueError: if `seq_length` cannot be cut so.
    """
    sizes = {"seq_length": seq_length, "num_slices": num_slices, "hidden_size": hidden_size, "multiple_of": multiple_of}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}.")
    units, rest = divmod(seq_length, multiple_of)
    if rest or units < num_slices:
        raise ValueError(
            f"seq_length={seq_length} cannot be cut into {num_slices} slices of multiples of {multiple_of}: it must be "
            f"a multiple of {multiple_of}, and at least {num_slices * multiple_of}."
        )
    ffn_hidden_size = 4 * hidden_size if ffn_hidden_size is None else ffn_hidden_size

    def cost_until(unit: int) -> int:
        """The cost of the positions before, in operations, divided by 4 hidden_size."""
        length = unit * multiple_of
        near = length if window is None else min(length, window)
        seen = near * (near + 1) // 2 + near * (length - near)
        return length * (2 * hidden_size + ffn_hidden_size) + seen

    def cut(largest: int) -> list[int]:
        """Where slices stop that are as long as they can be at this cost, while some is left for those after them."""
        stops = [0]
        for others in reversed(range(num_slices)):
            affordable = cost_until(stops[-1]) + largest
            stop = bisect_right(range(units + 1), affordable, key=cost_until) - 1
            stops.append(max(min(stop, units - others), stops[-1] + 1))
        return stops

    dearest = bisect_left(range(cost_until(units)), True, key=lambda largest: cut(largest)[-1] == units)
    stops = cut(dearest)
    return [multiple_of * (stop - start) for start, stop in pairwise(stops)]
