import pytest

from megapipe import StageInfo, parallel_state, stages_for_rank
from megapipe.plan import loop, v_shape


@pytest.mark.parametrize("placement", [loop, v_shape])
def test_rank_is_the_inverse_of_stage(placement: object) -> None:
    for pp_size in range(1, 6):
        for rank in range(pp_size):
            for info in placement.stages(rank, pp_size, 3):
                assert placement.rank(info.index, pp_size) == rank


def test_stages_for_rank() -> None:
    assert stages_for_rank("1f1b", 2, 4) == [StageInfo(2, 4)]
    assert stages_for_rank("1f1b") == [StageInfo(0, 1)]
    assert stages_for_rank("inference", 1, 2, num_chunks=2) == [StageInfo(1, 4), StageInfo(3, 4)]
    first, last = StageInfo(0, 3), StageInfo(2, 3)
    assert (first.is_first, first.is_last, last.is_first, last.is_last) == (True, False, False, True)
    with pytest.raises(ValueError, match="no rank 4 in a pipeline of 4"):
        stages_for_rank("1f1b", 4, 4)


def test_sizes_come_from_parallel_state_where_none_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test noticed when the number of chunks was not asked for there."""
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 4)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(parallel_state, "get_virtual_pipeline_model_parallel_world_size", lambda: 3)
    indices = {
        ("interleaved_1f1b",): [1, 5, 9],
        ("interleaved_1f1b", 0): [0, 4, 8],
        ("interleaved_1f1b", None, None, 1): [1],
        ("interleaved_1f1b", None, 5): [1, 6],  # of another pipeline
        ("zbv",): [1, 6],
        ("1f1b",): [1],
    }
    for arguments, stages in indices.items():
        assert [stage.index for stage in stages_for_rank(*arguments)] == stages
