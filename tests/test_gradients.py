"""Losses and gradients are those of the unpartitioned model, bit for bit."""

import pytest
from models import assert_same_gradients, assert_same_losses, build, reference, run
from ranks import RankPool

NUM_LAYERS = 4


def compare(rank: int, schedule: str, num_microbatches: list[int], dropout: float) -> None:
    for m in num_microbatches:
        import torch.distributed as dist

        chunks = build(schedule, dist.get_world_size(), NUM_LAYERS, dropout=dropout)
        reports = run(schedule, chunks, m)
        expected, losses = reference(NUM_LAYERS, m, dropout=dropout)
        assert_same_losses(reports, losses, chunks)
        assert_same_gradients(chunks, expected)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_equal_to_the_unpartitioned_model(ranks: RankPool, schedule: str, pp_size: int, dropout: float) -> None:
    ranks.run(pp_size, compare, schedule, [1, 2, 3, 4, 8], dropout)
