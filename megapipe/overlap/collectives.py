"""Communication among ranks in two halves, a start and a wait, there and back.

They are torch's functional collectives, so a graph of a captured stage has both halves, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from ..weight_grad import backward_context, once_differentiable
from .windows import fill_window

Collective = Callable[[Tensor, dist.ProcessGroup], Any]
"""Starts to exchange a contiguous tensor. What it returns has to be waited for."""


def start_all_to_all(
    x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: dist.ProcessGroup | None
) -> Pending:
    """Start to exchange rows with every rank of `group`: `dist.all_to_all_single` in two halves, differentiable.

        pending = start_all_to_all(x, output_splits, input_splits, group)
        yield
        y = pending.wait()

    In backward, the exchange of the gradients starts where `wait` was called and ends where this was. The backward of
    everything between the two runs meanwhile, and then the overlap window is filled. It is the same with the others.

    Args:
        x: [rows, ...], the rows for rank 0 first.
        output_splits: the number of rows from each rank, in host memory.
        input_splits: the number of rows of x for each rank, in host memory.
        group: None if this rank is alone: x comes back.

    Returns:
        The exchange under way; its `wait` gives [sum of output_splits, ...].
    """
    received, sent = list(output_splits), list(input_splits)
    return Pending(x, group, partial(_to_all, received, sent), partial(_to_all, sent, received))


def start_all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to gather the rows of all ranks of `group`. Backward is a reduce-scatter: each rank gets the sum of all
    ranks' gradients of its rows.

    Args:
        x: [rows, ...], of the same shape on all ranks.
        group: None if this rank is alone: x comes back.

    Returns:
        The communication under way; its `wait` gives [ranks * rows, ...], those of rank 0 first.
    """
    return Pending(x, group, _gather, _reduce_scatter)


def start_reduce_scatter(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to add up the tensors of all ranks of `group`, of which each gets its share of rows. Backward is an
    all-gather.

    Args:
        x: [ranks * rows, ...], of the same shape on all ranks, the rows for rank 0 first.
        group: None if this rank is alone: x comes back.

    Returns:
        The communication under way; its `wait` gives [rows, ...].

    Raises:
        ValueError: the rows cannot be shared out evenly.
    """
    if group is not None and len(x) % group.size():
        raise ValueError(f"{len(x)} rows cannot be shared out evenly among {group.size()} ranks: pad them.")
    return Pending(x, group, _reduce_scatter, _gather)


def start_all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to add up the tensors of all ranks of `group`, for all of them. Backward adds up the gradients of all ranks
    likewise, as it must where each rank computes something of its own from the sum.

    Args:
        x: of the same shape on all ranks.
        group: None if this rank is alone: x comes back.

    Returns:
        The communication under way; its `wait` gives the sum.
    """
    return Pending(x, group, _reduce, _reduce)


class Pending:
    """A communication that has started."""

    def __init__(self, x: Tensor, group: dist.ProcessGroup | None, there: Collective, back: Collective) -> None:
        self._alone = x if group is None else None
        if group is not None:
            self._num_stops = backward_context.num_stops
            self._exchange = _Exchange(group, there, back)
            self._token: Tensor = _Start.apply(x, self._exchange)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Returns what the other ranks have sent. Call it once. On an accelerator the current stream waits, not the
        host. Where the forward has not yielded since the start, this is an overlap window, for products of Ws."""
        if self._alone is not None:
            return self._alone
        if self._num_stops == backward_context.num_stops:
            fill_window()
        return _Finish.apply(self._token, self._exchange)  # type: ignore[no-untyped-call, no-any-return]


def _to_all(output_splits: list[int], input_splits: list[int], x: Tensor, group: dist.ProcessGroup) -> Any:
    return _functional.all_to_all_single(x, output_splits, input_splits, group.group_name)


def _gather(x: Tensor, group: dist.ProcessGroup) -> Any:
    return _functional.all_gather_into_tensor(x, group.size(), group.group_name)


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Any:
    return _functional.reduce_scatter_tensor(x, "sum", group.size(), group.group_name)


def _reduce(x: Tensor, group: dist.ProcessGroup) -> Any:
    return _functional.all_reduce(x, "sum", group.group_name)


_functional = torch.ops._c10d_functional


class _Exchange:
    """There, and back for the gradients. Holds the tensors of the communication under way."""

    def __init__(self, group: dist.ProcessGroup, there: Collective, back: Collective) -> None:
        self.there, self.back = there, back
        self._group = group
        self._under_way: tuple[Tensor, Tensor] | None = None

    def start(self, collective: Collective, x: Tensor) -> None:
        x = x.contiguous()
        self._under_way = (x, collective(x, self._group))

    def wait(self) -> Tensor:
        assert self._under_way is not None, "a communication is waited for once"
        (_, output), self._under_way = self._under_way, None
        return _functional.wait_tensor(output)  # type: ignore[no-any-return]


class _Start(Function):
    """The edge to `_Finish` is an empty tensor: the rows are not there yet, and have another shape in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(exchange.there, x)
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        fill_window()
        return ctx.exchange.wait(), None


class _Finish(Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        exchange = ctx.exchange
        exchange.start(exchange.back, grad)
        return grad.new_empty(0), None
