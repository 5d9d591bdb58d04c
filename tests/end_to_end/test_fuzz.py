"""Some of the random cases of `make fuzz`: quick ones, and one with captured stages."""

import pytest
from fuzz import run_case
from ranks import RankPool


@pytest.mark.parametrize("number", [2, 5, 8, 11, 14, 15, 16, 18, 20])
def test_a_random_case(ranks: RankPool, number: int) -> None:
    assert run_case(ranks, 1, number) is None
