"""The example on GPUs. tests/end_to_end has it on the CPU."""

from __future__ import annotations

import pytest
from gpu.test_gpu import device_of, needs_gpu
from tools.pretraining import pretrain
from tools.pretraining import text as text  # the fixture
from tools.ranks import RankPool

pytestmark = needs_gpu


def pretrain_on_gpus(rank: int, pp_size: int, arguments: str) -> list[float]:
    return pretrain(rank, pp_size, arguments, str(device_of(rank)))


def test_losses_of_the_example(ranks: RankPool, text: str) -> None:
    """The same on one rank and on two, up to the order of sums on a GPU."""
    (expected,) = ranks.run(1, pretrain_on_gpus, 1, f"{text} --no-bf16")
    assert expected[-1] < expected[0] - 0.1
    for options in ("--schedule zbv", "--post-validation --schedule zbv"):
        for losses in ranks.run(2, pretrain_on_gpus, 2, f"{text} --no-bf16 {options}"):
            assert losses == pytest.approx(expected, rel=1e-3)


def test_the_example_in_bfloat16(ranks: RankPool, text: str) -> None:
    for losses in ranks.run(2, pretrain_on_gpus, 2, f"{text} --bf16 --schedule interleaved_1f1b"):
        assert losses[-1] < losses[0] - 0.1
