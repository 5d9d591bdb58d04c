"""Who this rank is: the process groups of the pipeline and of its replicas, under Megatron's names.

Ranks are numbered with the pipeline outermost: with 2 replicas of 4 stages, ranks 0 2 4 6 are one pipeline and ranks
0 1 hold replicas of the same stage. Neighbouring stages are then on different nodes only where they must be, and the
replicas, which exchange most, are close. Experts are shared out among consecutive replicas.
"""

from __future__ import annotations

import torch.distributed as dist

from . import hooks
from .hooks import Groups

__all__ = [
    "destroy_model_parallel",
    "get_data_parallel_group",
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
    "initialize_model_parallel",
    "is_pipeline_first_stage",
    "is_pipeline_last_stage",
    "model_parallel_is_initialized",
]


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
        expert_model_parallel_size: replicas among which the experts of each stage are shared out.

    Raises ValueError where the sizes do not fit the world or differ between ranks, RuntimeError when called before
    torch.distributed is initialised or a second time.
    """
    global _groups
    if not dist.is_initialized():
        raise RuntimeError("torch.distributed is not initialised: call dist.init_process_group() first.")
    if _groups is not None:
        raise RuntimeError("model parallelism is initialised already: call destroy_model_parallel() first.")
    world_size = dist.get_world_size()
    sizes = (pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, expert_model_parallel_size)
    everybody: list[tuple[int, int | None, int]] = [sizes] * world_size
    dist.all_gather_object(everybody, sizes)
    if len(set(everybody)) > 1:
        listed = ", ".join(f"rank {rank}: {pp}, {vp} and {ep}" for rank, (pp, vp, ep) in enumerate(everybody))
        raise ValueError(
            "the ranks disagree on pipeline_model_parallel_size, virtual_pipeline_model_parallel_size and "
            f"expert_model_parallel_size ({listed}). Make them the same."
        )
    if pipeline_model_parallel_size < 1 or world_size % pipeline_model_parallel_size:
        raise ValueError(
            f"pipeline_model_parallel_size={pipeline_model_parallel_size} does not divide the {world_size} ranks there "
            f"are: start a multiple of {pipeline_model_parallel_size} ranks, or choose a divisor of {world_size}."
        )
    if virtual_pipeline_model_parallel_size is not None and virtual_pipeline_model_parallel_size < 1:
        raise ValueError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size}: use None for no virtual "
            "stages, or at least 2."
        )
    num_replicas = world_size // pipeline_model_parallel_size
    if expert_model_parallel_size < 1 or num_replicas % expert_model_parallel_size:
        raise ValueError(
            f"expert_model_parallel_size={expert_model_parallel_size} does not divide the {num_replicas} replicas of "
            f"the pipeline: start a multiple of {pipeline_model_parallel_size * max(1, expert_model_parallel_size)} "
            f"ranks, or choose a divisor of {num_replicas}."
        )
    pipelines = [list(range(replica, world_size, num_replicas)) for replica in range(num_replicas)]
    replicas = [list(ranks) for ranks in zip(*pipelines)]
    groups = Groups(_own_group(pipelines), _own_group(replicas), virtual_pipeline_model_parallel_size)
    if expert_model_parallel_size > 1:
        size = expert_model_parallel_size
        sharing = [ranks[first : first + size] for ranks in replicas for first in range(0, num_replicas, size)]
        same = [ranks[number::size] for ranks in replicas for number in range(size)]
        groups = groups._replace(expert=_own_group(sharing), expert_data=_own_group(same))
    _groups = groups


def destroy_model_parallel() -> None:
    """Forget the groups. The processes' communicators go with torch.distributed's."""
    global _groups
    _groups = None


def model_parallel_is_initialized() -> bool:
    """Whether there are groups: our own, or those of a framework that has made them."""
    return _find_groups() is not None


def get_pipeline_model_parallel_group() -> dist.ProcessGroup:
    return _existing_groups().pipeline


def get_pipeline_model_parallel_world_size() -> int:
    """Ranks per pipeline; 1 where torch.distributed is not in use."""
    return get_pipeline_model_parallel_group().size() if _needs_groups() else 1


def get_pipeline_model_parallel_rank() -> int:
    return get_pipeline_model_parallel_group().rank() if _needs_groups() else 0


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    return _existing_groups().virtual_size if _needs_groups() else None


def get_data_parallel_group() -> dist.ProcessGroup:
    return _existing_groups().data


def get_data_parallel_world_size() -> int:
    return get_data_parallel_group().size() if _needs_groups() else 1


def get_data_parallel_rank() -> int:
    return get_data_parallel_group().rank() if _needs_groups() else 0


def get_expert_model_parallel_group() -> dist.ProcessGroup | None:
    """The ranks that share out the experts of this rank's stages; None where each rank has all of them."""
    return _existing_groups().expert if _needs_groups() else None


def get_expert_model_parallel_world_size() -> int:
    group = get_expert_model_parallel_group()
    return 1 if group is None else group.size()


def get_expert_model_parallel_rank() -> int:
    group = get_expert_model_parallel_group()
    return 0 if group is None else group.rank()


def get_expert_data_parallel_group() -> dist.ProcessGroup:
    """The ranks that hold the same experts."""
    groups = _existing_groups()
    return groups.data if groups.expert_data is None else groups.expert_data


def is_pipeline_first_stage() -> bool:
    """Whether this rank holds the first stage, under loop or V placement alike."""
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage() -> bool:
    """Whether this rank is the last of its pipeline. With V placement the last stage is on rank 0: ask
    `stages_for_rank` instead."""
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _own_group(all_ranks: list[list[int]]) -> dist.ProcessGroup:
    """Make one group for each list of ranks, and return the one that this rank is in."""
    own = None
    for ranks in all_ranks:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own = group
    assert isinstance(own, dist.ProcessGroup)
    return own


def _needs_groups() -> bool:
    return _groups is not None or dist.is_initialized()


def _find_groups() -> Groups | None:
    if _groups is not None:
        return _groups
    return next((groups for find in hooks.find_groups if (groups := find()) is not None), None)


def _existing_groups() -> Groups:
    groups = _find_groups()
    if groups is None:
        raise RuntimeError(
            "the pipeline's process groups do not exist yet: call "
            "megapipe.parallel_state.initialize_model_parallel(pipeline_model_parallel_size=...) on every rank."
        )
    return groups
