"""The place of a chunk in the pipeline, as Megatron sees it while it builds one, reads data for one, and finalizes
gradients.

Megatron numbers a chunk's layers by its rank's place in the pipeline. Under V placement every other chunk runs the
other way, so for those the rank's place is shown to Megatron, and to the chunk ever after, as it is there. And the
first stage and the last are on one rank, where embeddings are tied without Megatron's group for that.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar
from unittest import mock

import torch.distributed as dist
from torch import nn

from ... import parallel_state as own_parallel_state
from ...chunks import find_attribute
from ...plan import AnySchedule, StageInfo, find_schedule
from .settings import loaded

Function = TypeVar("Function", bound=Callable[..., Any])


def build_model_chunks(
    model_provider: Callable[..., nn.Module], schedule: AnySchedule, config: Any = None, pg_collection: Any = None
) -> list[nn.Module]:
    """The chunks that this rank holds under `schedule`, made by a Megatron model provider.

    Args:
        model_provider: called as `model_provider(pre_process=..., post_process=..., vp_stage=...)` for each chunk. The
            config must have `virtual_pipeline_model_parallel_size` set to the number of chunks, or None for one.
        config, pg_collection: passed on to the provider where they are given. Without `pg_collection` the pipeline is
            that of `parallel_state`.

    Returns:
        The chunks, in the order of `stages_for_rank`.

    Raises:
        ValueError: where Megatron would cut the model for another number of chunks.
    """
    stages = _stages(schedule, pg_collection)
    _check_virtual_size(schedule, len(stages), config)
    given = {"config": config, "pg_collection": pg_collection}
    keywords = {name: value for name, value in given.items() if value is not None}
    provide = at_its_stage(model_provider, schedule)
    return [
        provide(
            pre_process=stage.is_first,
            post_process=stage.is_last,
            vp_stage=vp_stage if len(stages) > 1 else None,
            **keywords,
        )
        for vp_stage, stage in enumerate(stages)
    ]


def at_its_stage(function: Function, schedule: AnySchedule) -> Function:
    """Wrap `function` so that Megatron tells it the place of the chunk in question under `schedule`.

    For the functions of a Megatron trainer that ask Megatron where they are: its model provider, its
    `forward_step` and its `train_valid_test_datasets_provider`. The chunk is the one of `vp_stage=`, else that of the
    model among the arguments. `pre_process=` and `post_process=` are set right, and the pipeline's group in a
    `ProcessGroupCollection` as well. Without V placement all of it is as Megatron has it already.
    """
    first: list[nn.Parameter] = []  # the embedding of the first stage, for the copies of it behind

    @functools.wraps(function)
    def placed(*args: Any, **keywords: Any) -> Any:
        collection = next((one for one in (*args, *keywords.values()) if _is_collection(one)), None)
        stages = _stages(schedule, collection)
        vp_stage = keywords.get("vp_stage")
        if vp_stage is None:
            model = next((one for one in args if isinstance(one, nn.Module)), None)
            vp_stage = find_attribute(model, "vp_stage") or 0
        stage = stages[vp_stage]
        ends = {"pre_process": stage.is_first, "post_process": stage.is_last}
        keywords |= {name: value for name, value in ends.items() if name in keywords}
        if not has_last_stage_in_front(schedule):
            return function(*args, **keywords)
        pp_size = stage.num_stages // len(stages)
        with _seen_from(stage.index % pp_size) as seen:
            result = function(*map(seen, args), **{name: seen(value) for name, value in keywords.items()})
        if isinstance(result, nn.Module):
            _tie_embeddings(result, stage, first)
        return result

    return placed  # type: ignore[return-value]


def has_last_stage_in_front(schedule: AnySchedule) -> bool:
    """Whether the last stage is on the first rank, as in a V, and not on the last one as in Megatron."""
    placement = find_schedule(schedule).placement
    return placement.rank(2 * 2 - 1, pp_size=2) == 0


def _stages(schedule: AnySchedule, pg_collection: Any) -> list[StageInfo]:
    """`stages_for_rank`, for the pipeline in `pg_collection` where there is one."""
    found = find_schedule(schedule)
    group = getattr(pg_collection, "pp", None) or own_parallel_state.get_pipeline_model_parallel_group()
    default = 1 if group.size() == 1 else found.default_chunks  # Megatron has no virtual stages on one rank
    return found.stages(group.rank(), group.size(), found.num_chunks or _virtual_size() or default)


def _virtual_size(config: Any = None) -> int | None:
    size = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if size is None and own_parallel_state.model_parallel_is_initialized():
        size = own_parallel_state.get_virtual_pipeline_model_parallel_world_size()
    return size


def _check_virtual_size(schedule: AnySchedule, num_chunks: int, config: Any) -> None:
    virtual_size = _virtual_size(config) or 1
    if virtual_size != num_chunks:
        raise ValueError(
            f"{find_schedule(schedule).name} runs {num_chunks} chunk(s) on each rank, but Megatron was initialised "
            f"with virtual_pipeline_model_parallel_size={virtual_size} and would cut the model for that: initialise it "
            f"with {num_chunks if num_chunks > 1 else None}."
        )


class _GroupSeenFrom:
    """A process group as one of its other ranks sees it."""

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank

    def rank(self) -> int:
        return self._rank

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextmanager
def _seen_from(place: int) -> Iterator[Callable[[Any], Any]]:
    """Show Megatron this rank at another place in the pipeline, and give what shows it so in a group collection."""

    def seen(value: Any) -> Any:
        return _changed(value, pp=_group_seen_from(value.pp, place), embd=None) if _is_collection(value) else value

    parallel_state = loaded("parallel_state")
    with without_embedding_group():
        if not parallel_state.model_parallel_is_initialized():
            yield seen
            return
        group = _group_seen_from(parallel_state._PIPELINE_MODEL_PARALLEL_GROUP, place)
        own = {"_PIPELINE_MODEL_PARALLEL_GROUP": group, "_MPU_PIPELINE_MODEL_PARALLEL_RANK": place}
        with mock.patch.multiple(parallel_state, **own):
            yield seen


def _group_seen_from(group: Any, rank: int) -> Any:
    return group if group.rank() == rank else _GroupSeenFrom(group, rank)


# Tied embeddings


def without_embedding_group() -> AbstractContextManager[Any]:
    """Show Megatron that embeddings have no copies on other ranks."""
    return mock.patch.object(loaded("parallel_state"), "_EMBEDDING_GROUP", None)


def without_embedding(pg_collection: Any) -> Any:
    return _changed(pg_collection, embd=None) if _is_collection(pg_collection) else pg_collection


def copies_of_embedding(model: nn.Module) -> list[nn.Parameter]:
    """The embedding in a chunk that also is the head, or that multi-token prediction uses: Megatron marks it."""
    return [parameter for parameter in model.parameters() if getattr(parameter, "shared_embedding", False)]


def _tie_embeddings(chunk: nn.Module, stage: StageInfo, first: list[nn.Parameter]) -> None:
    """Give the copies in a chunk the values of the first stage's embedding, which Megatron fetches from its rank."""
    copies = copies_of_embedding(chunk)
    if stage.is_first:
        first[:] = copies
    elif copies:
        if copies[0].is_meta:
            raise ValueError(
                "config.init_model_with_meta_device leaves nothing to tie embeddings to: set it to False, or "
                "share_embeddings_and_output_weights."
            )
        for copy_of_it in copies:
            copy_of_it.data.copy_(first[0].data)


def _is_collection(value: Any) -> bool:
    module = loaded("process_groups_config")
    return module is not None and isinstance(value, module.ProcessGroupCollection)


def _changed(pg_collection: Any, **groups: dist.ProcessGroup | None) -> Any:
    changed = copy.copy(pg_collection)
    for name, group in groups.items():
        setattr(changed, name, group)
    return changed
