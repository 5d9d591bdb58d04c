"""Replicas of the pipeline without sharding: gradients averaged chunk by chunk, while other chunks still compute.

A chunk's gradients are complete after its last W. Then they are packed into buckets, and the buckets' all-reduces run
beside what is left of the step. A bucket holds the same parameters on every replica, whichever of them have a gradient,
and ends with a flag for each of them: so replicas may use different parameters, without waiting for each other or
taking zeros for a gradient.

For parameters that are sharded as well there is `fully_shard` of torch (see `sharding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..chunks import (
    as_sharded,
    by_dtype,
    dense,
    each_parameter,
    gradient_like,
    gradients,
    local,
    named_parameters,
    tensors_of,
    zero_gradient,
)
from ..failures import collective
from ..process_groups import all_gather_json


class GradientReducer:
    """Averages the gradients of all replicas. Every rank makes one, from all its chunks, before the first step:

        reducer = GradientReducer(chunks)
        config.grad_sync_func = reducer.start
        config.finalize_model_grads_func = reducer.finish

    Parameters and buffers take the values of the first replica. A parameter that no replica used keeps no gradient. One
    with the attribute `allreduce = False`, an expert's, is reduced among the ranks that hold the same expert
    (`parallel_state.get_expert_data_parallel_group()`), and divided by the number of all replicas nevertheless: its
    gradient is a sum over the tokens of all ranks that use it already. So it must be cleared before the next step: what
    has been reduced would be divided again. Parameters sharded by `fully_shard` are left to that; of those shared out
    along "tp" each rank's part is averaged.

    Args:
        chunks: this rank's chunks, as they are handed to the schedule.
        bucket_cap_mb: the size of a bucket in MiB; a larger gradient has a bucket of its own.

    Raises:
        ValueError: on all replicas of a stage, where their parameters differ in name, shape, dtype or whether they are
            trained.
    """

    def __init__(self, chunks: Sequence[nn.Module], bucket_cap_mb: float = 25.0) -> None:
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb}: 25 is torch's own choice.")
        self._group = parallel_state.get_data_parallel_group()
        with collective("the making of a GradientReducer"):
            _check_same_on_replicas(chunks, self._group)
            _broadcast(chunks, self._group)
        self._buckets: dict[Tensor, _Bucket] = {}
        for key, parameters in _by_destination(chunks, self._group).items():
            for part in _split(parameters, bucket_cap_mb * 2**20):
                self._buckets.update(dict.fromkeys(part, _Bucket(part, key.group, key.chunks)))

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        """Itself, for copies of a chunk that has it in its config: connections cannot be copied. A copy that is to be
        trained needs one made from its own parameters, as `finish` says."""
        return self

    def start(self, parameters: Iterable[Tensor]) -> None:
        """`grad_sync_func`: start to average the gradients of a chunk, given by its parameters."""
        mine = list(parameters)
        for bucket in dict.fromkeys(self._buckets[p] for p in mine if p in self._buckets):
            bucket.complete.add(tuple(map(id, mine)))
            if len(bucket.complete) == len(bucket.chunks):
                bucket.start()

    def finish(self, models: Sequence[nn.Module], num_tokens: Tensor | None = None) -> None:
        """`finalize_model_grads_func`: wait until all gradients are averaged; starts those that have not been. With
        `calculate_per_token_loss` they are then divided by the tokens of all replicas instead of their number.

        Raises:
            ValueError: where a parameter is trained that was frozen or not there when this was made.
            TypeError: for sparse gradients.
            PipelineError: where another rank has failed.
        """
        for name, parameter in each_parameter(models):
            if parameter.requires_grad and parameter not in self._buckets and not _is_left(parameter, self._group):
                raise ValueError(
                    f"{name} has no part in the GradientReducer, since it was frozen or not there when that was made: "
                    "make a new one after parameters have been unfrozen or added."
                )
        buckets = list(dict.fromkeys(self._buckets.values()))
        with collective("the averaging of gradients over replicas"):
            for bucket in buckets:
                if bucket.work is None:
                    bucket.start()
            for bucket in buckets:
                bucket.finish(self._group.size())
        if num_tokens is not None:
            divide_by_num_tokens(list(models), num_tokens, averaged=True)


class _Bucket:
    """Parameters whose gradients are reduced in one go.

    Args:
        chunks: those that the parameters belong to. There are several where a weight is tied within the rank.
    """

    def __init__(self, parameters: list[Tensor], group: dist.ProcessGroup, chunks: tuple[int, ...]) -> None:
        self.chunks = chunks
        self.complete: set[tuple[int, ...]] = set()
        """Chunks that are, each known by all its parameters: two may begin with one tied weight."""
        self.work: Any = None
        self._parameters = parameters
        self._group = group
        self._flat = torch.empty(0)

    def start(self) -> None:
        self.complete.clear()
        parts = []
        for parameter in self._parameters:
            grad = gradient_like(parameter)
            grad = zero_gradient(parameter) if grad is None else grad
            parts.append(local(dense(f"a parameter of shape {list(parameter.shape)}", grad)).flatten())
        flags = parts[0].new_ones(len(parts))  # filled on the device: a copy from the host would wait for it
        for parameter, flag in zip(self._parameters, flags):
            if parameter.grad is None:
                flag.zero_()
        self._flat = torch.cat([*parts, flags])
        self.work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def finish(self, num_replicas: int) -> None:
        self.work.wait()
        self.work = None
        self._flat /= num_replicas
        sizes = [local(parameter).numel() for parameter in self._parameters]
        *parts, flags = torch.split(self._flat, [*sizes, len(sizes)])
        self._flat = torch.empty(0)
        has_missing = any(parameter.grad is None for parameter in self._parameters)
        is_used = flags.tolist() if has_missing else [1.0] * len(sizes)  # reading them waits for the device
        for parameter, part, used in zip(self._parameters, parts, is_used):
            if parameter.grad is None and used:
                parameter.grad = torch.empty_like(parameter, dtype=part.dtype)
            if parameter.grad is not None:
                grad = local(parameter.grad)
                grad.copy_(part.view_as(grad))


class _Destination(NamedTuple):
    """What parameters must have in common to be in one bucket."""

    group: dist.ProcessGroup
    dtype: torch.dtype
    device: torch.device
    chunks: tuple[int, ...]


def _by_destination(chunks: Sequence[nn.Module], group: dist.ProcessGroup) -> dict[_Destination, list[Tensor]]:
    chunks_of: dict[Tensor, list[int]] = {}
    for number, chunk in enumerate(chunks):
        for parameter in chunk.parameters():
            if parameter.requires_grad and not _is_left(parameter, group):
                chunks_of.setdefault(parameter, []).append(number)
    found: dict[_Destination, list[Tensor]] = {}
    for shared, numbers in chunks_of.items():
        key = _Destination(_group_of(shared, group), shared.dtype, shared.device, tuple(numbers))
        found.setdefault(key, []).append(shared)
    return found


def _is_left(tensor: Tensor, group: dist.ProcessGroup) -> bool:
    """Whether `fully_shard` reduces its gradient: it has parts, or copies, on other replicas. A tensor that is shared
    out among the ranks of one replica, as tensor parallelism does, has not."""
    sharded = as_sharded(tensor)
    if sharded is None:
        return False
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    return not others or not others.isdisjoint(sharded.device_mesh.mesh.flatten().tolist())


def _group_of(tensor: Tensor, group: dist.ProcessGroup) -> dist.ProcessGroup:
    return group if getattr(tensor, "allreduce", True) else parallel_state.get_expert_data_parallel_group()


def _split(parameters: list[Tensor], cap: float) -> list[list[Tensor]]:
    """Parameters in their order, in lists of at most `cap` bytes, or of one parameter."""
    parts: list[list[Tensor]] = []
    size = 0.0
    for parameter in parameters:
        num_bytes = parameter.numel() * parameter.element_size()
        if not parts or size + num_bytes > cap:
            parts.append([])
            size = 0.0
        parts[-1].append(parameter)
        size += num_bytes
    return parts


def _check_same_on_replicas(chunks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    own = [
        (f"chunk {number}'s {name}", f"{list(p.shape)} {p.dtype}{'' if p.requires_grad else ' and frozen'}")
        for number, chunk in enumerate(chunks)
        for name, p in named_parameters(chunk)
    ]
    everybody = all_gather_json(own, group)
    for replica, theirs in enumerate(everybody):
        if theirs != everybody[0]:
            first, other = dict(everybody[0]), dict(theirs)
            names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
            what = "the order of the parameters differs"
            if names:
                values = [one.get(names[0], "missing") for one in (first, other)]
                what = f"{names[0]} is {values[0]} on replica 0 and {values[1]} on replica {replica}"
            raise ValueError(f"replicas of a stage must have the same parameters, but {what}: build them alike.")


def _broadcast(chunks: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    works = []
    for chunk in chunks:
        for tensor in tensors_of(chunk):
            if not _is_left(tensor, group):
                among = _group_of(tensor, group)
                source = dist.get_global_rank(among, 0)
                own = local(tensor).detach()  # gloo takes it as it lies, and knows not all dtypes
                sent = own.contiguous().flatten().view(torch.uint8)
                works.append((dist.broadcast(sent, source, group=among, async_op=True), own, sent))
    for work, own, sent in works:
        work.wait()
        if not own.is_contiguous():
            own.copy_(sent.view(own.dtype).view(own.shape))


def divide_by_num_tokens(
    models: list[nn.Module],
    num_tokens: Tensor | None,
    data_parallel_group: dist.ProcessGroup | None = None,
    averaged: bool = False,
) -> None:
    """Divide gradients by the number of tokens in the microbatches of all replicas, so that each token counts alike.

    For `config.calculate_per_token_loss`, where losses are sums over tokens: it is called in
    `finalize_model_grads_func`, or is that function. Every rank calls it, once for all calls of a schedule before an
    optimizer step, and not while a reduction over replicas is in flight (`GradientReducer.finish` calls it by itself).
    Only the rank of the last stage knows its tokens; all others receive the number here.

    Args:
        models: this rank's chunks.
        num_tokens: a tensor without dimensions, of any dtype: the tokens of this replica where this rank has its last
            stage, elsewhere 0 or the same.
        data_parallel_group: the replicas. None: those of `parallel_state`.
        averaged: the reduction over replicas averages gradients (the default of DistributedDataParallel and FSDP2)
            instead of adding them up.

    Raises:
        ValueError: where `num_tokens` is None: the loss was divided already; and for gradients kept as `main_grad`.
    """
    if num_tokens is None:
        raise ValueError("there is no number of tokens: set config.calculate_per_token_loss.")
    total = num_tokens.to(torch.float64)
    num_replicas = 1
    if dist.is_initialized():
        replicas = data_parallel_group or parallel_state.get_data_parallel_group()
        num_replicas = replicas.size()
        # Where a framework has told all ranks of a pipeline already, they have the same number.
        for group, op in ((parallel_state.find_pipeline_group(), dist.ReduceOp.MAX), (replicas, dist.ReduceOp.SUM)):
            dist.all_reduce(total, op, group)
    divisor = torch.where(total > 0, total, 1)
    _divide(gradients(models), divisor / num_replicas if averaged else divisor)


def _divide(grads: list[Tensor], divisor: Tensor) -> None:
    for dtype, group in by_dtype(grads).items():
        if dtype.itemsize > 2:
            torch._foreach_div_(group, divisor.to(dtype))
            continue
        for grad in group:  # the number of tokens may be more than 65504, the largest number of float16
            grad.copy_(grad.float() / divisor.float())
