"""Some of the random cases of `make fuzz`: quick ones that have most of its features, and one with captured stages."""

import pytest
from fuzz import make_case, run_case
from tools.ranks import RankPool


@pytest.mark.parametrize("number", [0, 1, 2, 20, 21, 22, 23, 32, 34])
def test_a_random_case(ranks: RankPool, number: int) -> None:
    assert run_case(ranks, make_case(1, number)) is None
