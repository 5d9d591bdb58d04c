"""The model's weights by name, on ranks that ask for them, while it is trained."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from .. import parallel_state
from ..chunks import Models, as_list, as_sharded, device_of
from ..safetensors_files import Entry
from ..training import finalize_weights
from ..weights_out import BUCKET, ChunkTensors, send_out
from .full_state import FullState, GlobalName


def named_weights(
    chunks: Models,
    to: int | Sequence[int] | None = None,
    *,
    global_name: GlobalName | None = None,
    dtype: torch.dtype | None = None,
    bucket_size: int = BUCKET,
) -> Iterator[tuple[str, Tensor]]:
    """All names and tensors of the model, under the names that a `Checkpointer` saves, on the ranks that ask for them.
    Every rank calls it with the same arguments and iterates to the end. (For chunks of transformers' models there is
    `megapipe.integrations.transformers.named_weights`, whose names and forms are those of files.)

    Tensors come from stages in their order, and from the shards of FSDP2. A tied one comes once. Each is the reader's
    own copy. Besides what a rank holds there are only a bucket and a tensor. Shards of tensor parallelism stay what
    they are: each of its ranks is a pipeline's own.

    Args:
        to: ranks among all, which get them. None stands for all ranks. Others get nothing and take part.
        global_name: as for a `Checkpointer`.
        dtype: of what is sent, for numbers with a point. None leaves it.
        bucket_size: bytes that are sent at once. A larger tensor is sent alone.

    Raises:
        ValueError: on every rank, for wrong arguments, or chunks that are missing.
        RuntimeError: on every rank that is still there, where one stops before the end, or is killed.
    """
    models = as_list(chunks)

    def describe() -> list[ChunkTensors]:
        finalize_weights(models)
        return [_part_of(chunk, number, models, global_name) for number, chunk in enumerate(models)]

    return send_out(describe, device_of(models), to, dtype, bucket_size)


def _part_of(
    chunk: nn.Module, number: int, models: Sequence[nn.Module], global_name: GlobalName | None
) -> ChunkTensors:
    """A chunk in the order of ranks, and behind all their first chunks all their second ones."""
    pp_size = parallel_state.get_pipeline_model_parallel_world_size()
    place = number * pp_size + parallel_state.get_pipeline_model_parallel_rank()
    made = functools.partial(_tensors_of, FullState([chunk], [], global_name))
    entries = [Entry(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made()]
    return ChunkTensors(place, pp_size * len(models), entries, functools.partial(_whole_tensors, made))


def _tensors_of(state: FullState) -> Iterator[tuple[str, Tensor]]:
    """Those of a chunk, without the copy of an embedding that is marked as one."""
    for held, name, tensor in state.named_tensors():
        if not getattr(held.value, "shared", False):
            yield name, tensor


def _whole_tensors(made: Callable[[], Iterator[tuple[str, Tensor]]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in made():
        sharded = as_sharded(tensor)
        yield name, tensor if sharded is None else sharded.full_tensor()
