"""Losses, gradients and weights are those of the unpartitioned model, bit for bit. Rows of as many ranks share jobs."""

from collections import defaultdict

import pytest
from tools.ranks import RankPool

from cases.case import Case
from cases.rows import ROWS
from cases.trial import run_rows

PER_JOB = 40


def jobs() -> dict[str, list[Case]]:
    by_sizes: dict[str, list[Case]] = defaultdict(list)
    for row in ROWS:
        by_sizes[f"{row.pp} x {row.num_replicas}"].append(row)
    return {
        f"{sizes}, {start}": rows[start : start + PER_JOB]
        for sizes, rows in sorted(by_sizes.items())
        for start in range(0, len(rows), PER_JOB)
    }


@pytest.mark.parametrize("rows", jobs().values(), ids=jobs().keys())
def test_equal_to_the_unpartitioned_model(ranks: RankPool, rows: list[Case]) -> None:
    run_rows(ranks, rows)
