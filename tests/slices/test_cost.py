import math
from collections.abc import Sequence
from itertools import accumulate, combinations

import pytest

from megapipe.slices import equal_cost


def cost_of(start: int, length: int, hidden: int, ffn: int, window: int | None = None) -> float:
    """Position by position, in operations of a forward."""
    linear = 8 * hidden**2 + 4 * hidden * ffn
    seen = (position + 1 if window is None else min(position + 1, window) for position in range(start, start + length))
    return sum(linear + 4 * hidden * number for number in seen)


@pytest.mark.parametrize("window", [None, 100, 700])
@pytest.mark.parametrize("num_slices", [1, 2, 3, 4, 8])
def test_slices_cost_the_same(num_slices: int, window: int | None) -> None:
    """To within the cost of a position for each of them."""
    lengths = equal_cost(2000, num_slices, 32, 96, window=window)
    assert sum(lengths) == 2000
    starts = [0, *accumulate(lengths)]
    costs = [cost_of(start, length, 32, 96, window) for start, length in zip(starts, lengths)]
    assert max(costs) - min(costs) <= num_slices * cost_of(1999, 1, 32, 96, window)


def test_what_attention_costs_decides_how_uneven_slices_are() -> None:
    assert equal_cost(4096, 4, hidden_size=1_000_000) == [1024] * 4
    squares = [4096 * (math.sqrt(i + 1) - math.sqrt(i)) / 2 for i in range(4)]
    assert equal_cost(4096, 4, hidden_size=1) == pytest.approx(squares, abs=4)


@pytest.mark.parametrize(("hidden", "ffn"), [(4096, None), (5120, 13824)])
def test_cuts_are_those_of_the_formula(hidden: int, ffn: int | None) -> None:
    """To within a position for each slice: c x + x^2 / 2 = i / n of its value at the end, where c = 2 h + f."""
    length, per_position = 32768, 2 * hidden + (4 * hidden if ffn is None else ffn) + 0.5
    total = per_position * length + length**2 / 2
    exact = [math.sqrt(per_position**2 + 2 * total * i / 4) - per_position for i in range(5)]
    assert list(accumulate(equal_cost(length, 4, hidden, ffn), initial=0)) == pytest.approx(exact, abs=4)


@pytest.mark.parametrize(("multiple_of", "num_slices"), [(1, 3), (4, 3), (4, 4), (8, 2)])
def test_the_dearest_slice_is_as_cheap_as_can_be(multiple_of: int, num_slices: int) -> None:
    """Of all ways to cut at multiples. Lengths fall."""
    length = 10 * multiple_of
    lengths = equal_cost(length, num_slices, 2, 1, multiple_of=multiple_of)
    assert sum(lengths) == length
    assert all(one % multiple_of == 0 for one in lengths)
    assert lengths == sorted(lengths, reverse=True)

    def dearest(stops: Sequence[int]) -> float:
        return max(cost_of(start, stop - start, 2, 1) for start, stop in zip([0, *stops], [*stops, length]))

    ways = combinations(range(multiple_of, length, multiple_of), num_slices - 1)
    assert dearest(list(accumulate(lengths))[:-1]) == min(map(dearest, ways))


def test_no_slice_is_empty() -> None:
    assert equal_cost(8, 8, 1) == [1] * 8
    assert equal_cost(9, 8, 1) == [2, 1, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((7, 8, 16), "seq_length=7 cannot be cut into 8 slices of multiples of 1: it must .* at least 8"),
        ((8, 0, 16), "num_slices must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_cut_is_an_error(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        equal_cost(*arguments)
    with pytest.raises(ValueError, match="must be a multiple of 3, and at least 6"):
        equal_cost(8, 2, 16, multiple_of=3)
