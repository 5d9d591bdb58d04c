"""Losses and gradients are those of the unpartitioned model, bit for bit."""

import functools

import pytest
from models import Stage, assert_same_gradients, assert_same_losses, build, reference, run
from ranks import RankPool
from torch import Tensor

import megapipe

NUM_LAYERS = 12
CHUNKS = {"looped_bfs": [1, 2, 3], "interleaved_1f1b": [1, 2, 3], "no_pipelining": [1, 2, 3]}
TRAINING = [name for name in megapipe.schedule_names() if name not in ("inference", "no_pipelining")]

unpartitioned = functools.lru_cache(maxsize=None)(reference)


def expect(num_microbatches: int, dropout: float) -> tuple[Stage, list[Tensor]]:
    """Computed once per worker."""
    return unpartitioned(NUM_LAYERS, num_microbatches, dropout=dropout)


def compare(rank: int, schedule: str, pp_size: int, num_microbatches: list[int], dropout: float) -> None:
    for num_chunks in CHUNKS.get(schedule, [None]):
        for m in num_microbatches:
            chunks = build(schedule, pp_size, NUM_LAYERS, num_chunks, dropout=dropout)
            reports = run(schedule, chunks, m)
            expected, losses = expect(m, dropout)
            assert_same_losses(reports, losses, chunks)
            assert_same_gradients(chunks, expected)


@pytest.mark.parametrize("pp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_equal_to_the_unpartitioned_model(ranks: RankPool, schedule: str, pp_size: int) -> None:
    ranks.run(pp_size, compare, schedule, pp_size, list(range(1, 10)), 0.0)


@pytest.mark.parametrize("pp_size", [2, 4])
@pytest.mark.parametrize("schedule", TRAINING)
def test_equal_with_dropout(ranks: RankPool, schedule: str, pp_size: int) -> None:
    ranks.run(pp_size, compare, schedule, pp_size, [1, 3, 8], 0.5)


def test_no_pipelining(ranks: RankPool) -> None:
    ranks.run(1, compare, "no_pipelining", 1, [1, 3, 8], 0.5)


def group_sizes(rank: int) -> None:
    for group_size in (2, 3, 5):
        for m in (1, 2, 3, 5, 6, 7):
            chunks = build("interleaved_1f1b", 2, NUM_LAYERS, 2, microbatch_group_size_per_vp_stage=group_size)
            run("interleaved_1f1b", chunks, m)
            assert_same_gradients(chunks, expect(m, 0.0)[0])


def test_interleaved_group_sizes(ranks: RankPool) -> None:
    ranks.run(2, group_sizes)
