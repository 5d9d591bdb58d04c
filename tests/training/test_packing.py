"""Which sequences go into which microbatch."""

from __future__ import annotations

import random

import pytest

from megapipe.plan import make_plan
from megapipe.training import pack


def drawn(count: int, seed: int = 0) -> list[int]:
    generator = random.Random(seed)
    return [min(8000, 16 + int(generator.lognormvariate(6.9, 1.0))) for _ in range(count)]


def arrived(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """As trainers that do not look ahead: the next sequence opens a microbatch where it finds no room."""
    found, tokens = [[]], 0
    for number, length in enumerate(lengths):
        if tokens + length > max_tokens:
            found.append([])
            tokens = 0
        found[-1].append(number)
        tokens += length
    return found


def cost(lengths: list[int], numbers: list[int]) -> int:
    return sum(lengths[number] * (12 * 4096 + lengths[number]) for number in numbers)


@pytest.mark.parametrize(("num_replicas", "num_microbatches"), [(1, None), (4, None), (4, 13)])
def test_every_sequence_once_and_as_much_in_each(num_replicas: int, num_microbatches: int | None) -> None:
    lengths = drawn(48 * num_replicas)
    found = pack(lengths, 8192, num_microbatches, num_replicas=num_replicas)
    assert sorted(number for microbatch in found for number in microbatch) == list(range(len(lengths)))
    assert max(sum(lengths[number] for number in microbatch) for microbatch in found) <= 8192
    number, rest = divmod(len(found), num_replicas)
    assert not rest
    assert number == (num_microbatches or -(-sum(lengths) // 8192 // num_replicas))
    of_replicas = [[cost(lengths, one) for one in found[r::num_replicas]] for r in range(num_replicas)]
    assert max(map(sum, of_replicas)) < 1.05 * min(map(sum, of_replicas))
    for costs in of_replicas:  # up to the longest, and down
        highest = costs.index(max(costs))
        assert costs[: highest + 1] == sorted(costs[: highest + 1])
        assert costs[highest:] == sorted(costs[highest:], reverse=True)


def test_the_same_wherever_it_is_called() -> None:
    """Ranks do not ask each other."""
    assert pack(drawn(40), 8192) == pack(drawn(40), 8192)


def test_steps_are_shorter_than_in_order_of_arrival() -> None:
    for seed in range(3):
        lengths = drawn(80, seed)
        times = []
        for microbatches in (arrived(lengths, 8192), pack(lengths, 8192)):
            costs = [cost(lengths, one) for one in microbatches]
            plan = make_plan("zbv", 4, len(costs))
            times.append(plan.simulate(microbatches=costs).makespan * sum(costs) / len(costs))
        assert times[1] < times[0]


@pytest.mark.parametrize(
    ("lengths", "options", "message"),
    [
        ([5, 90], {}, "have 5 to 90: cut longer ones"),
        ([], {}, "these are none"),
        ([0, 5], {}, "have 0 to 5"),
        ([30, 30, 30], {"num_microbatches": 1}, "3 sequences with 90 tokens cannot be shared out over 1 replicas"),
        ([30, 30], {"num_microbatches": 3}, "give more sequences"),
        ([30, 30, 30], {"num_replicas": 4}, "over 4 replicas with the same number of microbatches each"),
    ],
)
def test_what_cannot_be_packed(lengths: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack(lengths, 64, **options)  # type: ignore[arg-type]
