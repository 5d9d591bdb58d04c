"""Who this rank is: the process groups of the pipeline and of its replicas, under Megatron's names.

Ranks are numbered with the pipeline outermost: with 2 replicas of 4 stages, ranks 0 2 4 6 are one pipeline and ranks
0 1 hold replicas of the same stage. Neighbouring stages are then on different nodes only where they must be, and the
replicas, which exchange most, are close. Experts are distributed over consecutive replicas. For another order, or
replicas that are sharded in part, there is `initialize_from_mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .frameworks import frameworks
from .process_groups import all_gather_json

__all__ = [
    "destroy_model_parallel",
    "get_data_parallel_group",
    "get_data_parallel_mesh",
    "get_data_parallel_rank",
    "get_data_parallel_world_size",
    "get_expert_data_parallel_group",
    "get_expert_model_parallel_group",
    "get_expert_model_parallel_rank",
    "get_expert_model_parallel_world_size",
    "get_pipeline_model_parallel_group",
    "get_pipeline_model_parallel_rank",
    "get_pipeline_model_parallel_world_size",
    "get_virtual_pipeline_model_parallel_world_size",
    "initialize_from_mesh",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
]


class Groups(NamedTuple):
    """The process groups of a pipeline and its replicas."""

    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    virtual_size: int | None
    """Chunks per rank, for schedules that leave it open."""
    expert: dist.ProcessGroup | None = None
    """The ranks over which the experts of a stage are distributed; None where each rank has all of them."""
    expert_data: dist.ProcessGroup | None = None
    """The ranks that hold the same experts; None where these are the replicas in `data`."""
    data_mesh: DeviceMesh | None = None
    """The replicas in `data` as the mesh they were made from, if they were."""


_groups: Groups | None = None


def initialize_model_parallel(
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    expert_model_parallel_size: int = 1,
) -> None:
    """Make the process groups. Every rank calls it, with the same sizes, after `dist.init_process_group`.

    Args:
        pipeline_model_parallel_size: ranks per pipeline. The world is filled with replicas of the pipeline.
        virtual_pipeline_model_parallel_size: chunks per rank, for schedules that leave it open.
        expert_model_parallel_size: replicas over which the experts of each stage are distributed.

    Raises:
        ValueError: where the sizes do not fit the world or differ between ranks.
        RuntimeError: before torch.distributed is initialised, or at a second call.
    """
    global _groups
    _check_uninitialized()
    world_size = dist.get_world_size()
    _check_sizes(
        world_size, pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, expert_model_parallel_size
    )
    num_replicas = world_size // pipeline_model_parallel_size
    pipelines = [list(range(replica, world_size, num_replicas)) for replica in range(num_replicas)]
    replicas = [list(ranks) for ranks in zip(*pipelines)]
    groups = Groups(_own_group(pipelines), _own_group(replicas), virtual_pipeline_model_parallel_size)
    if expert_model_parallel_size > 1:
        size = expert_model_parallel_size
        sharing = [ranks[first : first + size] for ranks in replicas for first in range(0, num_replicas, size)]
        same = [ranks[number::size] for ranks in replicas for number in range(size)]
        groups = groups._replace(expert=_own_group(sharing), expert_data=_own_group(same))
    _groups = groups


def initialize_from_mesh(mesh: DeviceMesh, virtual_pipeline_model_parallel_size: int | None = None) -> None:
    """Take the process groups from a mesh of all ranks. Every rank calls it, with the same mesh:

        mesh = init_device_mesh("cuda", (4, 2, 8), mesh_dim_names=("pp", "dp_replicate", "dp_shard"))
        parallel_state.initialize_from_mesh(mesh)

    Its dimensions may come in any order, and those that are not needed be left out, but for "pp":

    - "pp": the ranks of a pipeline.
    - "dp": its replicas. Or in its place "dp_replicate" and then "dp_shard", or one of the two: parameters are sharded
      among the ranks along "dp_shard", and these groups are replicas of each other.
    - "ep": more replicas, over which the experts of each stage are distributed. Those along the "dp" dimensions hold
      the same ones.
    - "tp": ranks over which the tensors of a stage are sharded. Each has groups of its own.

    Args:
        mesh: of all ranks.
        virtual_pipeline_model_parallel_size: chunks per rank, for schedules that leave it open.

    Raises:
        ValueError: where the mesh has no "pp", a dimension with another name, or not all ranks.
        RuntimeError: before torch.distributed is initialised, or at a second call.
    """
    global _groups
    _check_uninitialized()
    names = _checked_names(mesh)
    sharded = [name for name in names if name in ("dp", "dp_replicate", "dp_shard")]
    experts = [name for name in names if name == "ep" and mesh.size(names.index(name)) > 1]
    data_mesh = mesh[tuple(sharded)] if sharded and not experts else None
    groups = Groups(
        _mesh_group(mesh, ["pp"]),
        _mesh_group(mesh, [name for name in names if name in (*sharded, "ep")]),
        virtual_pipeline_model_parallel_size,
        data_mesh=data_mesh,
    )
    if experts:
        groups = groups._replace(expert=_mesh_group(mesh, experts), expert_data=_mesh_group(mesh, sharded))
    _groups = groups


def destroy_model_parallel() -> None:
    """Forget the groups. The processes' communicators go with torch.distributed's."""
    global _groups
    _groups = None


def model_parallel_is_initialized() -> bool:
    """Whether there are groups: our own, or those of another framework."""
    return _find_groups() is not None


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    """The ranks of this rank's pipeline, in the order of their stages.

    Raises:
        RuntimeError: where there are no groups, as do all getters of groups.
    """
    return _existing_groups().pipeline


def find_pipeline_group() -> dist.ProcessGroup | None:
    """The pipeline's group; None without torch.distributed."""
    return get_pipeline_model_parallel_group() if dist.is_initialized() else None


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks per pipeline; 1 where torch.distributed is not in use."""
    return get_pipeline_model_parallel_group().size() if _needs_groups() else 1


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place in its pipeline, from 0 on; 0 where torch.distributed is not in use."""
    return get_pipeline_model_parallel_group().rank() if _needs_groups() else 0


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Chunks per rank, for schedules that leave it open; None where it was not given."""
    return _existing_groups().virtual_size if _needs_groups() else None


def get_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold replicas of this rank's stages, experts left aside."""
    return _existing_groups().data


def get_data_parallel_mesh() -> DeviceMesh:
    """The replicas of this rank's stages as a mesh for `fully_shard`: one dimension, or "dp_replicate" and "dp_shard"
    where `initialize_from_mesh` was given both, and no "ep"."""
    groups = _existing_groups()
    if groups.data_mesh is not None:
        return groups.data_mesh
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    default = "cpu" if accelerator is None else accelerator.type
    devices = dist.Backend.default_device_backend_map.items()
    backend = dist.get_backend(groups.data)
    device_type = next((device for device, name in devices if name == backend), default)
    return DeviceMesh.from_group(groups.data, device_type, mesh_dim_names=("dp",))


def get_data_parallel_world_size() -> int:
    """Replicas of the pipeline; 1 where torch.distributed is not in use."""
    return get_data_parallel_group().size() if _needs_groups() else 1


def get_data_parallel_rank() -> int:
    """The number of this rank's replica of the pipeline, from 0 on; 0 where torch.distributed is not in use."""
    return get_data_parallel_group().rank() if _needs_groups() else 0


def get_expert_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks over which the experts of this rank's stages are distributed; None where each rank has all of them."""
    return _existing_groups().expert if _needs_groups() else None


def get_expert_model_parallel_world_size() -> int:
    """Ranks over which the experts of a stage are distributed; 1 where each rank has all of them."""
    group = get_expert_model_parallel_group()
    return 1 if group is None else group.size()


def get_expert_model_parallel_rank() -> int:
    """This rank's place among those, from 0 on; 0 where each rank has all experts."""
    group = get_expert_model_parallel_group()
    return 0 if group is None else group.rank()


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold replicas of this rank's experts; all replicas of its stages where each has all experts."""
    groups = _existing_groups()
    return groups.data if groups.expert_data is None else groups.expert_data


def _own_group(all_ranks: list[list[int]]) -> dist.ProcessGroup:
    """Make one group for each list of ranks, and return the one that this rank is in."""
    own = None
    for ranks in all_ranks:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert isinstance(own, dist.ProcessGroup)
    return own


def _check_uninitialized() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is not initialised: start the script with torchrun, and call dist.init_process_group() "
            "before this."
        )
    if _groups is not None:
        raise RuntimeError("model parallelism is initialised already: call destroy_model_parallel() first.")


def _check_sizes(world_size: int, pp_size: int, vp_size: int | None, ep_size: int) -> None:
    """Collective. Raises ValueError on all ranks."""
    sizes = (pp_size, vp_size, ep_size)
    everybody = all_gather_json(sizes)
    if any(theirs != everybody[0] for theirs in everybody):
        listed = ", ".join(f"rank {rank}: {pp}, {vp} and {ep}" for rank, (pp, vp, ep) in enumerate(everybody))
        raise ValueError(
            "the ranks disagree on pipeline_model_parallel_size, virtual_pipeline_model_parallel_size and "
            f"expert_model_parallel_size ({listed}). Make them the same."
        )
    if min(pp_size, ep_size) < 1:
        raise ValueError(
            f"pipeline_model_parallel_size={pp_size} and expert_model_parallel_size={ep_size} must be at least 1."
        )
    if world_size % pp_size:
        raise ValueError(
            f"pipeline_model_parallel_size={pp_size} does not divide the {world_size} ranks there are: start a "
            f"multiple of {pp_size} ranks, or choose a divisor of {world_size}."
        )
    if vp_size is not None and vp_size < 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={vp_size}: use None for no virtual stages, or at least 1."
        )
    num_replicas = world_size // pp_size
    if num_replicas % ep_size:
        raise ValueError(
            f"expert_model_parallel_size={ep_size} does not divide the {num_replicas} replicas of the pipeline: start "
            f"a multiple of {pp_size * ep_size} ranks, or choose a divisor of {num_replicas}."
        )


_MESH_NAMES = ("pp", "dp", "dp_replicate", "dp_shard", "ep", "tp")


def _checked_names(mesh: DeviceMesh) -> tuple[str, ...]:
    names = mesh.mesh_dim_names or ()
    unknown = [name for name in names if name not in _MESH_NAMES]
    if "pp" not in names or unknown:
        raise ValueError(
            f"the dimensions of the mesh are named {', '.join(names) or 'nothing'}, but must be pp and any of "
            f'{", ".join(_MESH_NAMES[1:])}: name them by mesh_dim_names, and flatten others into "dp_shard" or "tp".'
        )
    if "dp" in names and ("dp_replicate" in names or "dp_shard" in names):
        raise ValueError('the mesh has "dp" beside "dp_replicate" or "dp_shard", which are its parts: leave it out.')
    if "dp_replicate" in names and "dp_shard" in names and names.index("dp_replicate") > names.index("dp_shard"):
        raise ValueError(
            'the mesh has "dp_shard" before "dp_replicate", but fully_shard needs them the other way: swap.'
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"the mesh has {mesh.size()} ranks ({' x '.join(map(str, mesh.mesh.shape))}), but there are "
            f"{dist.get_world_size()}: make one of all."
        )
    if any(bool((mesh.mesh.diff(dim=dim) < 0).any()) for dim in range(mesh.ndim)):
        raise ValueError(
            f"the ranks of the mesh, {mesh.mesh.tolist()}, do not grow along its dimensions, as they do in process "
            "groups: make it by init_device_mesh."
        )
    return names


def _mesh_group(mesh: DeviceMesh, wanted: Sequence[str]) -> dist.ProcessGroup:
    """The group of the ranks that differ from this one only along the dimensions `wanted`."""
    names = mesh.mesh_dim_names
    assert names is not None
    if len(wanted) == 1:
        return mesh.get_group(wanted[0])
    dims = [names.index(name) for name in wanted]
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    size = math.prod(mesh.mesh.shape[dim] for dim in dims)
    return _own_group(mesh.mesh.permute(*others, *dims).reshape(-1, size).tolist())


def _needs_groups() -> bool:
    return _groups is not None or dist.is_initialized()


def _find_groups() -> Groups | None:
    if _groups is not None:
        return _groups
    return next((groups for framework in frameworks() if (groups := framework.groups()) is not None), None)


def _existing_groups() -> Groups:
    groups = _find_groups()
    if groups is None:
        raise RuntimeError(
            "the pipeline's process groups do not exist yet: call "
            "megapipe.parallel_state.initialize_model_parallel(pipeline_model_parallel_size=...) on every rank."
        )
    return groups
