"""Megatron's models in segments: a chunk's schedule plan, by which Megatron overlaps its exchanges of experts.

The plan cuts each layer into nodes with a graph of their own. Those that exchange tokens run on a stream of their own,
so a forward yields and a backward has its overlap window where such a node has been launched.

Source: Megatron-LM's model_chunk_schedule_plan.py (https://github.com/NVIDIA/Megatron-LM).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ...chunks import wrapped_in
from ...frameworks import ForwardStep
from ...overlap import fill_window, in_segments
from ...stages import edge_of
from ...weight_grad import once_differentiable
from .settings import loaded, megatrons_config


def find_cut(model: nn.Module) -> Callable[[ForwardStep], ForwardStep] | None:
    if not getattr(megatrons_config(model), "overlap_moe_expert_parallel_comm", False):
        return None
    inside = next((inner for inner in wrapped_in(model) if hasattr(inner, "build_schedule_plan")), None)
    if inside is None:
        raise ValueError(
            "config.overlap_moe_expert_parallel_comm takes a model with build_schedule_plan, such as Megatron's "
            f"GPTModel, and a {type(model).__name__} has none: set it to False."
        )
    return functools.partial(_cut, inside)


def _cut(model: nn.Module, forward_step_func: ForwardStep) -> ForwardStep:
    """The forward_step_func that asks the caller's for a schedule plan, as Megatron's schedules do."""

    def forward_step(data_iterator: Any, chunk: nn.Module, *extra: bool) -> tuple[Any, Any]:
        utils = loaded("pipeline_parallel.utils")
        utils.set_streams()
        plan, loss_func = forward_step_func(data_iterator, model, *extra, return_schedule_plan=True)
        if not isinstance(plan, utils.AbstractSchedulePlan):
            raise TypeError(
                "with config.overlap_moe_expert_parallel_comm and return_schedule_plan=True forward_step_func must "
                f"return (model.build_schedule_plan(...), loss_func), but it returned a {type(plan).__name__}."
            )
        _check_nodes(plan, utils.ScheduleNode)
        return in_segments(_Planned(plan)), loss_func

    return forward_step


_NODES = {"pre_process", "attn", "moe_dispatch", "mlp", "moe_combine", "mtp_post_process", "post_process"}


def _check_nodes(plan: Any, node: type) -> None:
    """Refuse plans of releases that cut layers otherwise: a node left out would change the results."""
    parts = [plan, *map(plan.get_layer, range(plan.num_layers()))]
    unknown = {name for part in parts for name, value in vars(part).items() if isinstance(value, node)} - _NODES
    if unknown:
        raise ValueError(
            "with config.overlap_moe_expert_parallel_comm the installed Megatron cuts a layer into nodes that are not "
            f"known here ({', '.join(sorted(unknown))}): set it to False, or install megatron-core 0.16."
        )
    if getattr(plan, "recompute_vpp_stage", False):  # of later releases
        raise ValueError(
            "config.recompute_granularity='full' computes a chunk's whole schedule plan again, which only Megatron's "
            "own schedules do: set it to 'selective', or overlap_moe_expert_parallel_comm to False."
        )


class _Planned(nn.Module):
    """A schedule plan as a module that is called without arguments: all inputs are in it."""

    def __init__(self, plan: Any) -> None:
        super().__init__()
        self.plan = plan

    def forward_segments(self) -> Generator[None, None, Any]:
        plan = self.plan
        plan.record_current_stream()
        x, made_by = plan.pre_process.forward(), None
        for layer in map(plan.get_layer, range(plan.num_layers())):
            with layer.get_fp8_context():
                x = layer.moe_dispatch.forward(layer.attn.forward(x))
            if _exchanges(layer):
                yield
            with layer.get_fp8_context():
                x = layer.moe_combine.forward(layer.mlp.forward(x))
            if _exchanges(layer):
                yield
            with layer.get_fp8_context():
                x = layer.mtp_post_process.forward(x)
            made_by = next(n for n in (layer.mtp_post_process, layer.moe_combine, layer.mlp) if hasattr(n, "output"))
        if plan.post_process is not None:
            x = plan.post_process.forward(x)
        elif made_by is not None:
            made_by.output = (edge_of(x),)  # so the output is freed once it has been sent
        plan.wait_current_stream()
        if not x.requires_grad:
            return x  # nothing of it is trained
        return _Whole.apply(_requires_grad, plan, x.detach())  # type: ignore[no-untyped-call]


_requires_grad = torch.empty(0, requires_grad=True)


def _exchanges(layer: Any) -> bool:
    return hasattr(layer.moe_dispatch, "stream")  # a layer without experts has a NoopScheduleNode


class _Whole(Function):
    """All of a plan as one node. It writes the gradients of the chunk's input and weights to their `.grad` itself."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, plan: Any, output: Tensor) -> Tensor:
        ctx.plan, ctx.leaves_weight_grads = plan, True
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        plan = ctx.plan
        plan.record_current_stream()
        if plan.post_process is not None:
            grad = plan.post_process.backward(grad)
        while plan.num_layers():
            layer = plan.pop_layer()
            grad = layer.moe_combine.backward(layer.mtp_post_process.backward(grad))
            if _exchanges(layer):
                fill_window()
            grad = layer.moe_dispatch.backward(layer.mlp.backward(grad))
            # To free memory early, attention goes first, and waits for its gradient.
            is_early = getattr(layer.config, "ep_overlap_early_attn_memory_release", False)
            if not is_early and _exchanges(layer):
                fill_window()
            grad = layer.attn.backward(grad)
            if is_early and _exchanges(layer):
                fill_window()
            layer.release_state()
        plan.pre_process.backward(grad)
        plan.wait_current_stream()
        plan.release_state()
        return None, None, None
