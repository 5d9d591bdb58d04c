"""Tells the caller's functions when replicas may exchange parameters and gradients: gradients at a chunk's last
microbatch, not before.

The names are Megatron's: `no_sync_func` holds synchronisation back, `grad_sync_func` starts it for a chunk,
`finalize_model_grads_func` completes it at the end of the step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..config import StepConfig
from ..gradients import add_tokens, take_tokens
from ..weight_grad import visit_gradient_nodes


class GradientSync(AbstractContextManager["GradientSync"]):
    """The context of one step: holds gradient synchronisation back, and releases it chunk by chunk.

    Args:
        num_forwards: the number of forwards of each chunk.
        is_split: the schedule splits backwards, so that gradients become complete in a W.
        forward_only: nothing is trained, so there are no gradients.
    """

    is_void = False
    """Whether the results of the step are thrown away: then gradients are not synchronised."""

    def __init__(
        self,
        config: StepConfig,
        models: Sequence[nn.Module],
        num_forwards: int,
        is_split: bool,
        forward_only: bool = False,
    ) -> None:
        self._models = models
        self._is_split = is_split
        self._forward_only = forward_only
        self._num_forwards = num_forwards
        per_chunk = isinstance(config.no_sync_func, (list, tuple))
        # One context for all chunks, or one for each.
        self._no_sync = list(config.no_sync_func) if per_chunk else [config.no_sync_func]
        self._contexts = [ExitStack() for _ in self._no_sync]
        self._grad_sync = _one_per_chunk(config.grad_sync_func, len(models))
        self._complete: set[int] = set()  # chunks
        self._to_release = list(range(len(models)))
        self._param_sync = _one_per_chunk(None if forward_only else config.param_sync_func, len(models))

    def __enter__(self) -> GradientSync:
        with ExitStack() as stack:
            self._enter_contexts(stack)
            self._stack = stack.pop_all()
        return self

    def _enter_contexts(self, stack: ExitStack) -> None:
        """Enter the contexts that a step runs in."""
        if self._forward_only:
            stack.enter_context(torch.no_grad())
            return
        for number, context in enumerate(self._contexts):
            stack.callback(context.close)
            self._hold(number)

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def before_action(self) -> None:
        """Called before each action, before its message is waited for."""

    def before_forward(self, chunk: int, number: int, num_backwards_left: int) -> None:
        """Called before each forward. Gathers parameters one chunk ahead of their use, and lets torch's
        DistributedDataParallel see the last forward.

        DistributedDataParallel prepares its reduction in the forward. If only the last backward is left after this
        forward, the forward runs with synchronisation on, as in Megatron without a pipeline.
        """
        if number == 0:
            for ahead in (0, 1) if chunk == 0 else (chunk + 1,):
                if ahead < len(self._models):
                    self._gather(ahead)
        if number == self._num_forwards - 1 and num_backwards_left == 1:
            has_own_context = len(self._contexts) == len(self._models)
            if has_own_context and self._grad_sync[chunk] is None and not self._is_split:
                self._contexts[chunk].close()

    def _gather(self, chunk: int) -> None:
        if (param_sync := self._param_sync[chunk]) is not None:
            param_sync(self._models[chunk].parameters())

    def after_weights(self, chunk: int) -> None:
        """Called after each W of `chunk`."""

    @contextmanager
    def last_gradients(self, chunk: int, in_w: bool) -> Iterator[None]:
        """The context of the action that completes the gradients of `chunk`: its last backward, or with `in_w` its last
        W. Autograd does not run in a W, so it is made to visit the parameters once more, for hooks on its nodes."""
        context = self._context_of(chunk)
        if self._grad_sync[chunk] is None and not self.is_void:
            self._contexts[context].close()  # the model's own hooks fire during the backward
            yield
            if in_w and self._no_sync[context] is not None:
                visit_gradient_nodes([p for p in self._models[chunk].parameters() if p.requires_grad])
            self._hold(context)
        else:
            yield
        self._complete.add(chunk)
        # From the last chunk to the first, as backwards end: replicas that run different plans may complete them in
        # different orders, but must reduce in the same.
        while self._to_release and self._to_release[-1] in self._complete:
            self._release(self._to_release.pop())

    def _release(self, chunk: int) -> None:
        """Start to reduce the gradients of a chunk."""
        grad_sync = self._grad_sync[chunk]
        if grad_sync is not None and not self.is_void:
            context = self._context_of(chunk)
            self._contexts[context].close()
            grad_sync(self._models[chunk].parameters())
            self._hold(context)

    def _context_of(self, chunk: int) -> int:
        return min(chunk, len(self._contexts) - 1)

    def _hold(self, context: int) -> None:
        no_sync = self._no_sync[context]
        if no_sync is not None:
            self._contexts[context].enter_context(no_sync())


def finalize_gradients(
    config: StepConfig, models: list[nn.Module], num_tokens: Tensor, keywords: dict[str, Any]
) -> None:
    """Called at the end of a training step: call the caller's `finalize_model_grads_func`, with those of Megatron's
    `keywords` that it takes. Without such a function, gradients and token counts are added up over steps.

    Args:
        num_tokens: the sum over the microbatches, of shape [], in float64.
    """
    function = config.finalize_model_grads_func
    if function is None:
        if config.calculate_per_token_loss:
            add_tokens(models, num_tokens)
        return
    tokens = num_tokens + take_tokens(models) if config.calculate_per_token_loss else None
    function(models, tokens, **{name: value for name, value in keywords.items() if _takes(function, name)})


def _one_per_chunk(function: Any, num_chunks: int) -> list[Callable[..., Any] | None]:
    return list(function) if isinstance(function, (list, tuple)) else [function] * num_chunks


def _takes(function: Callable[..., Any], keyword: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # some builtins have none
        return False
    return keyword in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
