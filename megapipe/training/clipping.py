"""The norm of all gradients of a pipeline, and clipping by it.

Every rank adds up what it holds: its own stages, each tied weight in one place only, and the shards and experts that
the ranks beside it hold of the same stages. The sums of all stages are then added in the order of the ranks, on every
rank alike. All of it is float64, so that the norm does not depend on how the model is cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import parallel_state
from ..chunks import (
    Models,
    as_list,
    as_sharded,
    by_dtype,
    dense,
    device_of,
    gradient_of,
    gradients,
    local,
    trained_parameters,
)
from ..failures import collective
from ..process_groups import all_gather_json


def clip_grad_norm_(
    model: Models,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Scale the gradients of the whole pipeline so that their norm is at most `max_norm`. Every rank calls it.

    It is called after the gradients have been reduced over replicas and summed over tied weights. Gradients may be
    DTensors: what is sharded is added up over its mesh, what is replicated counts once. Parameters with
    `allreduce=False` are experts, added up over the expert-parallel group; those with `shared=True` are further copies
    of tied weights, scaled but not counted (`TiedWeights` marks them).

    Args:
        model: this rank's chunks, or the only one.
        max_norm: the largest norm there is afterwards; `math.inf` only measures.
        norm_type: the order p of the norm, positive, or `math.inf` for the largest absolute value.
        error_if_nonfinite: raise where the norm is NaN or infinite. Otherwise gradients are scaled by max_norm / norm
            where that is below 1, so not at all by a NaN.
        group: the pipeline's ranks. None: those of `parallel_state`.

    Returns:
        The norm before clipping, a float64 tensor without dimensions, the same on every rank.

    Raises:
        ValueError: for norms that are not positive, and for gradients kept as `main_grad`.
        TypeError: for sparse gradients.
        RuntimeError: with `error_if_nonfinite`, on every rank; it names the parameters and the ranks that hold them.
        PipelineError: where another rank has failed.
    """
    check_norm(max_norm, norm_type)
    models = as_list(model)
    with collective("the norm of the gradients"):
        norm = norm_of(gather_power_sums(power_sum(models, norm_type), group)[0], norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(_describe_nonfinite(models, norm, group))
    scale_gradients(gradients(models), norm, max_norm)
    return norm


def check_norm(max_norm: float, norm_type: float) -> None:
    if not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}: use math.inf to measure without clipping.")
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive, got {norm_type}: use 2.0, or math.inf for the largest value.")


def power_sum(models: Sequence[nn.Module], norm_type: float) -> Tensor:
    """The sum of |g|^p over the stages of this rank, or the largest |g|: float64, without dimensions. Collective over
    the ranks that hold the same stages, where parameters are sharded or experts distributed over them."""
    device = device_of(models)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for groups, parameters in _by_holders(models).items():
        found = ((name, gradient_of(name, parameter)) for name, parameter in parameters)
        grads = [local(dense(name, grad)) for name, grad in found if grad is not None]
        part = _power_sum(grads, norm_type, device)
        if math.isinf(norm_type):
            part = part.nan_to_num(math.inf, math.inf)  # a maximum over ranks may pass over a NaN
        for group in groups:
            op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
            dist.all_reduce(part, op, group=group)
        total = _combine(torch.stack([total, part]), norm_type)
    return total


def gather_power_sums(own: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> tuple[Tensor, Any]:
    """The power sums of all stages, by pipeline rank, and with `async_op` the collective to wait for. Collective."""
    group = group or parallel_state.find_pipeline_group()
    if group is None or group.size() == 1:
        return own.reshape(1), None
    sums = own.new_empty(group.size())
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its newer name
    return sums, gather(sums, own.reshape(1), group=group, async_op=async_op)


def norm_of(power_sums: Tensor, norm_type: float) -> Tensor:
    total = _combine(power_sums, norm_type)
    if math.isinf(norm_type):
        return total
    return total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)


def scale_gradients(grads: list[Tensor], norm: Tensor, max_norm: float) -> None:
    """Multiply `grads` in place by max_norm / norm where that is below 1. The host waits for nothing.

    Gradients in 16 bits are multiplied in float32: in float16 there is no 1e-8, in bfloat16 there are 3 digits.
    """
    coefficient = torch.where(norm > max_norm, max_norm / norm, 1.0)
    if math.isfinite(max_norm):
        for dtype, group in by_dtype(grads).items():
            if dtype.itemsize >= 4:
                torch._foreach_mul_(group, coefficient.to(dtype))
                continue
            for grad in group:  # torch computes in the wider dtype of two tensors with as many dimensions
                grad.mul_(coefficient.float().reshape([1] * grad.dim()))


def _by_holders(models: Sequence[nn.Module]) -> dict[tuple[dist.ProcessGroup, ...], list[tuple[str, nn.Parameter]]]:
    """The parameters that count, by the groups whose ranks hold their other parts. It depends on no gradient, so that
    the ranks of a group add up the same parameters."""
    experts = parallel_state.get_expert_model_parallel_group()
    held: dict[tuple[dist.ProcessGroup, ...], list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in trained_parameters(models):
        if getattr(parameter, "shared", False):
            continue
        groups = []
        if (sharded := as_sharded(parameter)) is not None:
            mesh = sharded.device_mesh
            groups = [mesh.get_group(dim) for dim, placed in enumerate(sharded.placements) if not placed.is_replicate()]
        if experts is not None and experts.size() > 1 and not getattr(parameter, "allreduce", True):
            groups.append(experts)
        held.setdefault(tuple(groups), []).append((name, parameter))
    return held


def _power_sum(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    grads = [grad for grad in grads if grad.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = torch.cat(
        [
            torch.stack(torch._foreach_norm(alike, norm_type, dtype=torch.promote_types(dtype, torch.float64)))
            for dtype, alike in by_dtype(grads).items()
        ]
    )
    return _combine(norms if math.isinf(norm_type) else norms.pow(norm_type), norm_type)


def _combine(parts: Tensor, norm_type: float) -> Tensor:
    return parts.max() if math.isinf(norm_type) else parts.sum()


def _describe_nonfinite(models: Sequence[nn.Module], norm: Tensor, group: dist.ProcessGroup | None) -> str:
    """The error's text, on every rank. Collective over the same groups as the norm."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    found: list[str] = []
    for groups, parameters in _by_holders(models).items():
        bad = [
            f"{name} on rank {rank}"
            for name, parameter in parameters
            if parameter.grad is not None and not local(parameter.grad).isfinite().all()
        ]
        for holders in groups:
            bad = _gather(bad, holders)
        found += bad
    pipeline = group or parallel_state.find_pipeline_group()
    if pipeline is not None:
        found = _gather(found, pipeline)
    named = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return (
        f"the norm of the gradients is {norm.item()}: there is NaN or Inf in the gradient of "
        f"{named or 'no parameter, only the sum is too large'}. Skip this step, or lower the learning rate or loss "
        "scale."
    )


def _gather(own: list[str], group: dist.ProcessGroup) -> list[str]:
    return [name for one in all_gather_json(own, group) for name in one]
