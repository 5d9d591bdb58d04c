"""Megatron's mixture of experts, its exchanges overlapped by its own schedule plans: the same to the last bit."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from fakes.megatron_on_cpu import with_streams
from tools.against import assert_same_gradients
from tools.megatron_models import batches, forward_step, megatron, provider, step
from tools.ranks import on_ranks
from torch import Tensor, nn
from torch.autograd import Function

import megapipe
from megapipe.integrations.megatron import build_model_chunks, defer_weight_gradients, framework

pytestmark = pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="make test installs megatron-core")

EXPERTS = {
    "ep_size": 2,
    "num_moe_experts": 4,
    "moe_layer_freq": [0, 1, 1, 1],
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 8,
    "moe_aux_loss_coeff": 0.1,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


class Delayed(Function):
    """A linear layer's product with its weight gradient left to `backward_dw`, as transformer-engine's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        ctx.layer.wgrad_store.context.put((x.flatten(0, -2), grad.flatten(0, -2)))
        return grad @ weight, None, None


def delay_weight_gradients(chunk: nn.Module) -> None:
    def backward_dw(layer: Any) -> None:
        x, grad = layer.wgrad_store.context.get(block=False)
        layer.weight.grad = grad.t() @ x
        for hook in layer.hooks:
            hook()

    for layer in chunk.modules():
        if type(layer).__name__ in ("ColumnParallelLinear", "RowParallelLinear"):
            layer.wgrad_store = SimpleNamespace(context=queue.Queue())
            layer.weight.skip_backward_post_hook, layer.hooks = True, []
            layer.register_wgrad_accumulation_and_reduce_hooks = layer.hooks.append
            layer.backward_dw = functools.partial(backward_dw, layer)
            layer._forward_impl = lambda input, weight, layer=layer, **_: Delayed.apply(input, weight, layer)


def train(
    schedule: str,
    pp_size: int,
    is_overlapped: bool,
    change: Callable[[nn.Module], object] = lambda chunk: None,
    is_delayed: bool = False,
) -> tuple[list[nn.Module], list[float]]:
    """In Megatron's wrapper, with reductions that overlap."""
    config = megatron(pp_size, 2 if pp_size > 1 else None, **EXPERTS)
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    # Its own check wants half precision.
    config.overlap_moe_expert_parallel_comm, config.delay_wgrad_compute = is_overlapped, is_delayed
    chunks = build_model_chunks(provider(config), schedule)
    for chunk in chunks:
        change(chunk)
    ddp_config = DistributedDataParallelConfig(
        overlap_grad_reduce=True, bucket_size=500, delay_wgrad_compute=is_delayed
    )
    wrapped = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
    config.no_sync_func = [one.no_sync for one in wrapped]
    config.finalize_model_grads_func = lambda models, tokens: [one.finish_grad_sync() for one in models]
    data = batches(4 if pp_size == 1 else 5, seed=megapipe.parallel_state.get_data_parallel_rank())
    losses = step(megapipe.get_forward_backward_func(schedule), wrapped, data)
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = parameter.main_grad
    return chunks, losses


@on_ranks(4)
def test_overlapped_is_equal(rank: int) -> None:
    """With layers such as transformer-engine's with `delay_wgrad_compute`."""
    with with_streams():
        plain, expected = train("dualpipev", 2, is_overlapped=False)
        chunks, losses = train("dualpipev", 2, True, delay_weight_gradients, is_delayed=True)
    assert losses == expected
    for chunk, other in zip(chunks, plain):
        assert_same_gradients([chunk], other)


@on_ranks(2)
def test_each_computes_while_the_other_exchanges(rank: int) -> None:
    """On one rank, with the last layer of one microbatch and the first, a dense one, of the next. Layers of ours that
    defer compute the same."""
    from megatron.core.pipeline_parallel.utils import ScheduleNode

    run: list[str] = []

    def noting(letter: str, method: Any) -> Any:
        def call(node: Any, *args: Any) -> Any:
            run.append(f"{letter} {node.name}")
            return method(node, *args)

        return call

    with with_streams():
        plain, expected = train("combined_1f1b", 1, is_overlapped=False)
        with (
            mock.patch.object(ScheduleNode, "_forward", noting("F", ScheduleNode._forward)),
            mock.patch.object(ScheduleNode, "_backward", noting("B", ScheduleNode._backward)),
        ):
            overlapped = train("combined_1f1b", 1, is_overlapped=True)
        deferring = train("combined_zb1p", 1, True, defer_weight_gradients)
    for chunks, losses in (overlapped, deferring):
        assert losses == expected
        assert_same_gradients(chunks, plain[0])
    pair = list(itertools.dropwhile(lambda what: what.startswith("F"), run))[:18]
    assert pair == [
        *["B post_process", "B moe_combine"],
        *["F pre_process", "F attn", "F mlp", "F attn", "F moe_dispatch"],
        *["B mlp", "B moe_dispatch"],
        *["F mlp", "F moe_combine"],
        *["B attn", "B moe_combine"],
        *["F attn", "F moe_dispatch"],
        *["B mlp", "B moe_dispatch"],
        "F mlp",
    ]


@on_ranks(2)
def test_what_has_no_schedule_plan(rank: int) -> None:
    config = megatron(1, **EXPERTS)
    config.overlap_moe_expert_parallel_comm = True
    other = nn.Linear(1, 1)
    other.config = config
    with pytest.raises(ValueError, match=r"takes a model with build_schedule_plan, .* and a Linear has none"):
        framework.find_cut(other)
    with with_streams(), pytest.raises(TypeError, match=r"must return \(model.build_schedule_plan.* returned a Tensor"):
        step(
            megapipe.get_forward_backward_func("combined_1f1b"),
            build_model_chunks(provider(config), "combined_1f1b"),
            batches(2, 0),
            forward_step_func=lambda data, model, return_schedule_plan: forward_step(data, model),
        )


class LaterPlan:
    """Of a release that cuts layers otherwise."""

    def __init__(self, **state: Any) -> None:
        vars(self).update(state)

    def num_layers(self) -> int:
        return 1

    def get_layer(self, number: int) -> LaterPlan:
        return LaterPlan(attn=1.0, mhc_post=2.0, config=None)


def test_plans_of_other_releases() -> None:
    check = megapipe.integrations.megatron.segments._check_nodes
    check(LaterPlan(), str)  # there is no such node
    with pytest.raises(ValueError, match=r"nodes that are not known here \(mhc_post\)"):
        check(LaterPlan(), float)
    with pytest.raises(ValueError, match="recompute_granularity='full' computes a chunk's whole schedule plan again"):
        check(LaterPlan(recompute_vpp_stage=True), str)
