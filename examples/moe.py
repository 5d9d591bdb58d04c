"""A mixture of experts in place of a layer's MLP, its experts shared out among ranks (expert parallelism).

Every token goes to the experts that a router chooses and through one that all share. Nothing is dropped: an expert
takes as many tokens as choose it, none included. The layer's forward runs in segments (megapipe.overlap): it yields
where it is about to wait for an exchange of tokens, so that another microbatch's backward may be computed meanwhile.

It keeps nothing of a microbatch on itself: one may be in its forward while another is in its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megapipe.overlap import run_segments, start_all_to_all
from megapipe.weight_grad import GroupedLinear, Linear


class Router(nn.Module):
    """Chooses the experts of each token.

    The loads of experts are evened out by an auxiliary loss, by a bias, or by both. The bias is added to probabilities
    where experts are chosen, and nowhere else (https://arxiv.org/abs/2408.15664): `balance_loads` changes it.

    Args:
        config: with `moe_aux_loss_coeff`, the weight of the auxiliary loss (https://arxiv.org/abs/2101.03961, equation
            4), and `moe_aux_loss_scale`, what it is multiplied with before it is differentiated, as the loss is.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.topk, num_experts = config.moe_topk, config.num_experts
        if not 1 <= self.topk <= num_experts:
            raise ValueError(f"topk={self.topk} of {num_experts} experts cannot be chosen: use 1 to {num_experts}.")
        self.aux_loss_coeff = config.moe_aux_loss_coeff
        self.aux_loss_scale = config.moe_aux_loss_scale
        self.weight = nn.Parameter(torch.empty(num_experts, config.hidden_size))
        nn.init.normal_(self.weight, std=0.02)
        self.register_buffer("bias", torch.zeros(num_experts))
        self.register_buffer("load", torch.zeros(num_experts), persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[tokens, hidden] to weights, with sum 1 for each token, and experts, both [tokens, topk]."""
        with torch.autocast(tokens.device.type, enabled=False):  # choices are too close for half precision
            probabilities = F.linear(tokens.float(), self.weight.float()).softmax(-1)
            experts = (probabilities + self.bias).topk(self.topk).indices
        if self.training and torch.is_grad_enabled():
            self.load += count(experts, len(self.load))
        weights = probabilities.gather(-1, experts)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.aux_loss_coeff and torch.is_grad_enabled():
            aux_loss = self.aux_loss_coeff * load_balancing_loss(probabilities, experts)
            weights = AddGradientOf.apply(weights, aux_loss, self.aux_loss_scale)
        return weights.to(tokens.dtype), experts


def balance_loads(modules: Iterable[nn.Module], rate: float, group: dist.ProcessGroup | None) -> None:
    """After a training step: raise the bias of experts that had less than the mean of tokens, and lower that of others.

    Args:
        modules: this rank's chunks.
        rate: how much, of probabilities.
        group: the ranks whose tokens count together: all replicas of these chunks. None where there is one.
    """
    routers = [inner for module in modules for inner in module.modules() if isinstance(inner, Router)]
    if not routers:
        return
    loads = torch.stack([router.load for router in routers])
    if group is not None:
        dist.all_reduce(loads, group=group)
    for router, load in zip(routers, loads):
        router.bias += rate * (load.mean() - load).sign()
        router.load.zero_()


def count(experts: Tensor, num_experts: int) -> Tensor:
    """How often each was chosen. torch.bincount would wait for an accelerator."""
    numbers = torch.arange(num_experts, device=experts.device)
    return (experts.flatten() == numbers.unsqueeze(1)).sum(1)


def load_balancing_loss(probabilities: Tensor, experts: Tensor) -> Tensor:
    """Number of experts times the sum over them of: share of tokens that chose it x mean probability. 1 when even."""
    num_experts = probabilities.shape[-1]
    shares = count(experts, num_experts) / experts.numel()
    return num_experts * (shares * probabilities.mean(0)).sum()


class AddGradientOf(torch.autograd.Function):
    """Hands on `x`, and lets `loss` have a gradient as if it had been added to the loss, with `scale`. So a loss that
    belongs to a layer need not travel through the pipeline."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.of_loss = torch.full_like(loss, scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, ctx.of_loss, None


def inverse(order: Tensor) -> Tensor:
    """The order that undoes it: a scatter, where another sort would take passes over all bits of a number."""
    places = torch.arange(order.shape[0], device=order.device)  # len() asks for a number
    return torch.empty_like(order).scatter_(0, order, places)


class Permute(torch.autograd.Function):
    """`x[order]`, for an order that has every row once. Its gradient is gathered too: no sum whose order is chance."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad[inverse(order)], None


class MLP(nn.Module):
    """Two linear layers with gelu between them. Grouped ones are told how many tokens each expert has."""

    def __init__(self, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, tokens: Tensor, *tokens_per_expert: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(tokens, *tokens_per_expert)), *tokens_per_expert)


class MoE(nn.Module):
    """[..., hidden] to [..., hidden].

    Args:
        config: a GPTConfig. The ranks of its `expert_model_parallel_group` share out the experts, in their order; None
            where this rank has them all. All of them run the same forwards and backwards in the same order, each on
            its own tokens.

    The experts' parameters are marked with `allreduce = False`, as in Megatron: the other ranks of the group have
    other experts, so their gradients are not to be summed up with theirs. And with `first_expert`, the number of their
    first one among all.
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.group = group = config.expert_model_parallel_group
        self.group_size, group_rank = (1, 0) if group is None else (group.size(), group.rank())
        if config.num_experts % self.group_size:
            raise ValueError(
                f"{config.num_experts} experts cannot be shared out evenly among {self.group_size} ranks: use a "
                f"multiple of {self.group_size}."
            )
        self.num_local_experts = config.num_experts // self.group_size
        self.router = Router(config)
        self.experts = self.make_mlp(config, partial(GroupedLinear, self.num_local_experts))
        self.shared = self.make_mlp(config, Linear)
        for parameter in self.experts.parameters():
            parameter.allreduce = False
            parameter.first_expert = group_rank * self.num_local_experts

    def make_mlp(self, config: Any, linear: Callable[[int, int], nn.Module]) -> nn.Module:
        """Of the experts, and of the one that all tokens go through."""
        width = 4 * config.hidden_size
        return MLP(linear(config.hidden_size, width), linear(width, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return run_segments(self.forward_segments(x))

    def forward_segments(self, x: Tensor) -> Generator[None, None, Tensor]:
        tokens = x.flatten(0, -2)
        weights, experts = self.router(tokens)
        order = experts.flatten().argsort(stable=True)
        sent, received = self._exchange_counts(experts)
        input_splits, output_splits = self._read_splits(sent, received, len(order))

        copies = tokens.unsqueeze(1).expand(-1, self.router.topk, -1).flatten(0, 1)
        dispatch = start_all_to_all(Permute.apply(copies, order), output_splits, input_splits, self.group)
        shared = self.shared(tokens)  # while the tokens are on their way
        yield
        arrived = dispatch.wait()

        # Bring the tokens of each of our experts together, whichever rank they came from.
        owners = torch.arange(self.num_local_experts, device=x.device).repeat(self.group_size)
        owners = owners.repeat_interleave(received.flatten(), output_size=sum(output_splits))
        by_expert = owners.argsort(stable=True)
        computed = self.experts(Permute.apply(arrived, by_expert), received.sum(0))
        to_send = Permute.apply(computed, inverse(by_expert))
        combine = start_all_to_all(to_send, input_splits, output_splits, self.group)
        yield
        returned = Permute.apply(combine.wait(), inverse(order))
        routed = (returned.unflatten(0, (-1, self.router.topk)) * weights.unsqueeze(-1)).sum(1)
        return (shared + routed).view_as(x)

    def _exchange_counts(self, experts: Tensor) -> tuple[Tensor, Tensor]:
        """How many of our tokens go to each rank and expert there, and how many come from each rank for each of our
        experts, both [group_size, num_local_experts]."""
        sent = count(experts, self.group_size * self.num_local_experts)
        each = [self.num_local_experts] * self.group_size
        received = start_all_to_all(sent, each, each, self.group).wait()
        return sent.view(self.group_size, -1), received.view(self.group_size, -1)

    def _read_splits(self, sent: Tensor, received: Tensor, num_rows: int) -> list[list[int]]:
        """How many rows go to each rank, and come from each: the one time that the host waits for the device."""
        if self.group is None:
            return [[num_rows], [num_rows]]
        splits: list[list[int]] = torch.stack((sent, received)).sum(2).cpu().tolist()
        for size in (*splits[0], *splits[1]):  # what a captured stage has no other way to know
            torch._check(size >= 0)
        torch._check(sum(splits[0]) == num_rows)
        return splits


def whole_names(name: str, parameter: nn.Parameter, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """`tensor`, the parameter or one like it, under its name in the whole model: one of experts expert by expert, as
    views, under their numbers among all."""
    first = getattr(parameter, "first_expert", None)
    if first is None:
        yield name, tensor
    else:
        for number, part in enumerate(tensor, first):
            yield f"{name}.{number}", part
