"""Restarted by torchrun after kill -9: a short version of tests/soak_restart.py."""

from pathlib import Path

import pytest
import soak_restart


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_killed_ranks_change_nothing(tmp_path: Path) -> None:
    assert soak_restart.soak(tmp_path, 1, seed=1, num_steps=10, options="--async-save") == 1
