"""The same as `root.py` for torch from 2.9 to 2.14, where FSDP2 has no public functions for it.

Nothing here can be relied on in another torch than those that the tests are run on. Of what is used, these differ
between them: a module's state had one group of parameters and has several; `comm_ctx` kept one reduce-scatter and keeps
several.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..chunks import laid_out_like
from .root import Root


class PrivateRoot(Root):
    def __init__(self, module: Any, forward_only: bool) -> None:
        super().__init__(module, forward_only)
        self._context = self._state._state_ctx
        self._is_last_backward = self._context.is_last_backward
        self._end_backward = self._state._root_post_backward_final_callback

    def check(self, roots: Iterable[Root]) -> None:
        """Here all of it works."""

    def begin(self) -> None:
        self._context.is_last_backward = False
        self._keep_whole()

    def gather(self) -> None:
        for group in self._groups:
            group.unshard(async_op=True)

    def reshard(self) -> None:
        self.wait_for_gathers()
        for group in self._groups:
            group.reshard()

    def add_up(self) -> None:
        for group in self._groups:
            if group.mp_policy.reduce_dtype is not None:
                for parameter in group.fsdp_params:
                    parameter.accumulate_unsharded_grad_if_needed()
                    parameter.to_accumulated_grad_if_needed()

    def fail(self) -> None:
        super().fail()
        self._forget_forwards()
        for parameter in self._parameters():
            parameter.unsharded_accumulated_grad = None

    def _finish_backwards(self) -> None:
        for group in reversed(self._groups):
            group.post_backward()

    def _wait_for_reduction(self) -> None:
        self._end_backward()
        self._forget_forwards()

    def _forget_forwards(self) -> None:
        self._communication.post_forward_order.clear()
        for group in self._groups:
            group._post_forward_indices.clear()

    def wait_for_gathers(self) -> None:
        for group in self._groups:
            group.wait_for_unshard()

    def _restore(self) -> None:
        self._context.is_last_backward = self._is_last_backward
        super()._restore()

    def _gradient(self, parameter: Any) -> Tensor | None:
        accumulated: Tensor | None = parameter.unsharded_accumulated_grad
        return super()._gradient(parameter) if accumulated is None else accumulated

    def _lay_out_gradients(self) -> None:
        super()._lay_out_gradients()
        for parameter in self._parameters():
            if (grad := parameter.unsharded_accumulated_grad) is not None:
                parameter.unsharded_accumulated_grad = laid_out_like(parameter.unsharded_param, grad)

    def _give_zeros(self, parameter: Any) -> None:
        zeros = torch.zeros_like(parameter.unsharded_param)
        if parameter.reduce_dtype is None:
            parameter.unsharded_param.grad = zeros
        else:
            parameter.unsharded_accumulated_grad = zeros.to(parameter.reduce_dtype)

    def _stream(self) -> Any:
        return self._communication.reduce_scatter_stream
