"""Losses and gradients are those of the unpartitioned model, bit for bit."""

import itertools

import pytest
from tools.models import assert_same_gradients, assert_same_losses, build, run, unpartitioned
from tools.ranks import RankPool, on_ranks

import megapipe
from megapipe.plan import make_plan

NUM_LAYERS, MORE_LAYERS = 8, 12  # the latter for three chunks on four ranks
CHUNKS = {name: [1, 2, 3] for name in ("no_pipelining", "looped_bfs", "interleaved_1f1b", "interleaved_zb1p")}
CHUNKS |= {"combined_1f1b": [2], "combined_zb1p": [2]}
TRAINING = [name for name in megapipe.schedule_names() if name not in ("inference", "no_pipelining")]
SPLIT = [name for name in TRAINING if any(action.kind == "W" for action in make_plan(name, 4, 8).actions[0])]
WHOLE = [name for name in TRAINING if name not in SPLIT]


def compare(
    rank: int,
    schedules: list[str],
    pp_size: int,
    num_microbatches: list[int],
    dropout: float = 0.0,
    deferred: bool = False,
    recompute: bool = False,
) -> None:
    options = {"dropout": dropout, "deferred": deferred, "recompute": recompute}
    for schedule, m in itertools.product(schedules, num_microbatches):
        for num_chunks in CHUNKS.get(schedule, [None]):
            if num_chunks in (1, 3) and m not in (1, 5):
                continue
            num_layers = MORE_LAYERS if num_chunks == 3 else NUM_LAYERS
            chunks = build(schedule, pp_size, num_layers, num_chunks, **options)
            reports = run(schedule, chunks, m)
            expected, losses = unpartitioned(num_layers, m, dropout)
            try:
                assert_same_losses(reports, losses, chunks)
                assert_same_gradients(chunks, expected)
            except AssertionError as error:
                raise AssertionError(f"{schedule} with {num_chunks} chunks and {m} microbatches: {error}") from error


# On how many ranks, and with how many microbatches: plans are proved for all (tests/plan/test_schedules.py).
SIZES = [
    *((1, [1, 5]), (2, [1, 5]), (3, [2, 5]), (4, [5, 8])),
    *(pytest.param(*more, marks=pytest.mark.soak) for more in ((1, [2]), (2, [2, 8]), (3, [1, 8]), (4, [1, 2]))),
]


@pytest.mark.parametrize(("pp_size", "num_microbatches"), SIZES)
def test_equal_to_the_unpartitioned_model(ranks: RankPool, pp_size: int, num_microbatches: list[int]) -> None:
    ranks.run(pp_size, compare, WHOLE, pp_size, num_microbatches, 0.5)


@pytest.mark.parametrize(("pp_size", "num_microbatches"), SIZES)
def test_equal_with_deferred_weight_gradients(ranks: RankPool, pp_size: int, num_microbatches: list[int]) -> None:
    """To the unpartitioned model with the same layers, which adds to its gradients as they do."""
    ranks.run(pp_size, compare, SPLIT, pp_size, num_microbatches, 0.0, True)


@pytest.mark.parametrize(("pp_size", "num_microbatches"), [(2, [1, 5]), (3, [3]), (4, [6])])
def test_equal_when_recomputed(ranks: RankPool, pp_size: int, num_microbatches: list[int]) -> None:
    ranks.run(pp_size, compare, SPLIT, pp_size, num_microbatches, 0.5, True, True)


def test_equal_where_no_layer_puts_anything_off(ranks: RankPool) -> None:
    """Then B is the whole backward and W has nothing to do."""
    ranks.run(2, compare, SPLIT, 2, [1, 4])


def test_no_pipelining(ranks: RankPool) -> None:
    ranks.run(1, compare, ["no_pipelining"], 1, [1, 3, 8], 0.5)


@on_ranks(2)
def test_interleaved_group_sizes(rank: int) -> None:
    for group_size in (2, 3, 5):
        for m in (1, 2, 3, 5, 6, 7):
            chunks = build("interleaved_1f1b", 2, NUM_LAYERS, 2, microbatch_group_size_per_vp_stage=group_size)
            run("interleaved_1f1b", chunks, m)
            assert_same_gradients(chunks, unpartitioned(NUM_LAYERS, m, 0.0)[0])
