"""A handful of the random cases of `make fuzz`."""

import pytest
from fuzz import run_case
from ranks import RankPool


@pytest.mark.parametrize("number", [1, 2, 3, 5, 11])
def test_a_random_case(ranks: RankPool, number: int) -> None:
    assert run_case(ranks, 1, number) is None
