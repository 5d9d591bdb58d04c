"""Every architecture under several schedules: `make test-models`. test_transformers.py has three of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import on_ranks

pytest.importorskip("transformers")

import hf_models

SCHEDULES = ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"]


@pytest.mark.parametrize("deferred", [False, True], ids=["plain", "deferred"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", hf_models.CONFIGS)
@on_ranks()
def test_losses_and_gradients(
    rank: int, num_ranks: int, name: str, schedule: str, deferred: bool, tmp_path: Path
) -> None:
    hf_models.check(name, schedule, tmp_path, deferred=deferred)
