"""The communication of experts, in two halves both ways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_to_all_single_autograd

from ..weight_grad import is_capturing
from .windows import fill_window

__all__ = ["PendingAllToAll", "start_all_to_all"]


def start_all_to_all(
    x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: dist.ProcessGroup | None
) -> PendingAllToAll:
    """Start to exchange rows with every rank of `group`: `dist.all_to_all_single` in two halves, differentiable.

        pending = start_all_to_all(x, output_splits, input_splits, group)
        yield
        y = pending.wait()

    In backward, the exchange of the gradients starts where `wait` was called and ends where this was. The backward of
    everything between the two runs meanwhile, and then the overlap window is filled.

    Args:
        x: [rows, ...], the rows for rank 0 first.
        output_splits: the number of rows from each rank, in host memory.
        input_splits: the number of rows of x for each rank, in host memory.
        group: None if this rank is alone: x comes back.

    Returns:
        The exchange under way; its `wait` gives [sum of output_splits, ...].
    """
    return PendingAllToAll(x, output_splits, input_splits, group)


class PendingAllToAll:
    """An exchange that has started."""

    def __init__(
        self, x: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: dist.ProcessGroup | None
    ) -> None:
        if group is None:
            self._alone: Tensor | None = x
            return
        if is_capturing():  # in a graph its start and its wait are apart as it is, both ways
            self._alone = all_to_all_single_autograd(x, list(output_splits), list(input_splits), group)
            return
        self._alone = None
        self._exchange = _Exchange(list(output_splits), list(input_splits), group)
        self._token: Tensor = _Start.apply(x, self._exchange)  # type: ignore[no-untyped-call]

    def wait(self) -> Tensor:
        """Returns [sum of output_splits, ...], the rows from rank 0 first. Call it once. On an accelerator the current
        stream waits, not the host."""
        if self._alone is not None:
            return self._alone
        return _Finish.apply(self._token, self._exchange)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange:
    """There and back. Holds the tensors of the exchange under way."""

    def __init__(self, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup) -> None:
        self._splits = (output_splits, input_splits)
        self._group = group
        self._under_way: tuple[dist.Work, Tensor, Tensor] | None = None

    def start(self, x: Tensor, *, back: bool = False) -> None:
        output_splits, input_splits = reversed(self._splits) if back else self._splits
        x = x.contiguous()
        output = x.new_empty(sum(output_splits), *x.shape[1:])
        work = dist.all_to_all_single(output, x, output_splits, input_splits, self._group, async_op=True)
        assert work is not None
        self._under_way = (work, x, output)

    def wait(self) -> Tensor:
        assert self._under_way is not None, "an exchange is waited for once"
        (work, _, output), self._under_way = self._under_way, None
        work.wait()
        return output


class _Start(Function):
    """The edge to `_Finish` is an empty tensor: the rows are not there yet, and have another shape in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.start(x)
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
        ctx.exchange.start(grad, back=True)
        return grad.new_empty(0), None
