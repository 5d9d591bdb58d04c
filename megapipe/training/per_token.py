"""Gradients of losses that are sums over tokens, divided by the tokens of all replicas."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..chunks import by_dtype, gradients

__all__ = ["divide_by_num_tokens"]


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
