import pytest

from megapipe import StageInfo, distribute_layers, parallel_state, stages_for_rank
from megapipe.plan import loop, v_shape


def stages(placement: object, pp_size: int, num_chunks: int) -> list[list[int]]:
    return [[s.index for s in placement.stages(rank, pp_size, num_chunks)] for rank in range(pp_size)]


def test_loop() -> None:
    assert stages(loop, 4, 2) == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_v_shape() -> None:
    assert stages(v_shape, 4, 2) == [[0, 7], [1, 6], [2, 5], [3, 4]]
    assert stages(v_shape, 2, 3) == [[0, 3, 4], [1, 2, 5]]


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


def layers(num_layers: int, num_stages: int, *virtual: int) -> list[list[int]]:
    return [list(distribute_layers(num_layers, StageInfo(i, num_stages), *virtual)) for i in range(num_stages)]


def test_layers_are_shared_out_evenly_and_none_is_lost() -> None:
    assert layers(8, 4) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [len(part) for part in layers(30, 4)] == [8, 8, 7, 7]
    for num_layers in range(4, 40):
        assert [layer for part in layers(num_layers, 4) for layer in part] == list(range(num_layers))


def test_virtual_layers_weigh_the_ends() -> None:
    assert [len(part) for part in layers(10, 4, 1, 1)] == [2, 3, 3, 2]
    assert [len(part) for part in layers(13, 4, 2, 1)] == [2, 4, 4, 3]


def test_a_stage_without_layers_is_an_error() -> None:
    with pytest.raises(ValueError, match="3 layers, with 0 virtual ones in front and 0 behind, leave stage 3 of 4"):
        layers(3, 4)
    with pytest.raises(ValueError, match="leave stage 0 of 4 without a layer"):
        layers(8, 4, 3)
