"""Process groups from sizes and from a mesh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tools.ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megapipe import parallel_state


def groups() -> list[list[int]]:
    """The ranks of this rank's pipeline, of its replicas, of those that share experts, and that have the same."""
    expert = parallel_state.get_expert_model_parallel_group()
    found = [
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_data_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    ]
    return [dist.get_process_group_ranks(group) for group in found] + (
        [] if expert is None else [dist.get_process_group_ranks(expert)]
    )


def from_mesh(**shape: int) -> DeviceMesh:
    parallel_state.destroy_model_parallel()
    mesh = init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
    parallel_state.initialize_from_mesh(mesh)
    return mesh


@on_ranks(4)
def test_meshes(rank: int) -> None:
    for ep_size in (1, 2):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(2 // ep_size, 3, expert_model_parallel_size=ep_size)
        by_sizes = groups()
        data_mesh = parallel_state.get_data_parallel_mesh()
        assert data_mesh.mesh_dim_names == ("dp",)
        assert data_mesh.mesh.tolist() == by_sizes[1]
        from_mesh(**({"pp": 2, "dp": 2} if ep_size == 1 else {"pp": 1, "dp": 2, "ep": 2}))
        assert groups() == by_sizes
        assert parallel_state.get_data_parallel_mesh().mesh.tolist() == by_sizes[1]

    from_mesh(dp_replicate=2, pp=1, dp_shard=2)
    assert groups() == [[rank], [0, 1, 2, 3], [0, 1, 2, 3]]
    hybrid = parallel_state.get_data_parallel_mesh()
    assert hybrid.mesh_dim_names == ("dp_replicate", "dp_shard")
    assert hybrid.mesh.tolist() == [[0, 1], [2, 3]]

    # One rank for experts made the mesh flat: what was to be replicated was sharded.
    from_mesh(pp=1, dp_replicate=2, dp_shard=2, ep=1)
    assert parallel_state.get_data_parallel_mesh().mesh_dim_names == ("dp_replicate", "dp_shard")

    from_mesh(dp_shard=2, pp=2)
    pipeline = [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups() == [pipeline, [rank % 2, rank % 2 + 2], [rank % 2, rank % 2 + 2]]
    assert parallel_state.get_data_parallel_mesh().mesh_dim_names == ("dp_shard",)
    assert parallel_state.get_pipeline_model_parallel_rank() == rank % 2
    assert parallel_state.get_virtual_pipeline_model_parallel_world_size() is None

    mesh = from_mesh(tp=2, pp=2)  # no replicas
    assert groups() == [[rank % 2 + 2 * (rank // 2) for rank in pipeline], [rank], [rank]]
    with pytest.raises(RuntimeError, match="initialised already"):
        parallel_state.initialize_from_mesh(mesh)


@on_ranks(2)
def test_meshes_that_do_not_fit(rank: int) -> None:
    def message(mesh: Any) -> str:
        with pytest.raises(ValueError, match=r".") as error:
            parallel_state.initialize_from_mesh(mesh)
        return str(error.value)

    def mesh(*names: str) -> DeviceMesh:
        return init_device_mesh("cpu", (2, *[1] * (len(names) - 1)), mesh_dim_names=names)

    assert "named dp, but must be pp and any of dp, dp_replicate, dp_shard, ep, tp" in message(mesh("dp"))
    assert "named pp, cp, but must be" in message(mesh("pp", "cp"))
    assert "named nothing" in message(init_device_mesh("cpu", (2,)))
    assert '"dp" beside "dp_replicate"' in message(mesh("pp", "dp", "dp_shard"))
    assert '"dp_shard" before "dp_replicate"' in message(mesh("pp", "dp_shard", "dp_replicate"))
    reversed_mesh = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("pp",))
    assert "the ranks of the mesh, [1, 0], do not grow" in message(reversed_mesh)
    one = DeviceMesh("cpu", torch.tensor([rank]), mesh_dim_names=("pp",), _init_backend=False)
    assert "the mesh has 1 ranks (1), but there are 2: make one of all" in message(one)
