"""A forward of one stage and a backward of another, overlapped on one thread, in one of two ways.

In segments: `forward_step_func` returns `in_segments(model, ...)`, and forward and backward run in each other's waits
for communication (megapipe.overlap). Or in the model's own way: its class defines `overlapped_forward_backward`,
DualPipe's hook, which is given the arguments of that call. A backward without a partner fills its overlap windows with
its own weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from ..overlap import Segments, filling_windows, find_forward_segments
from ..p2p_communication import Transfer
from ..weight_grad import DeferredGrads, deferring
from .edges import run_backward
from .loss import Loss
from .stage import SavedForward, Stage

__all__ = ["Forward", "can_overlap", "has_hook", "run_alone", "run_pair", "run_pair_by_hook"]

HOOK = "overlapped_forward_backward"

Made = tuple[Transfer | None, SavedForward | None]


def can_overlap(forward: Stage, backward: Stage) -> bool:
    """Whether the models know how to run such a pair at once."""
    return has_hook(forward, backward) or find_forward_segments(forward.module) is not None


def has_hook(forward: Stage, backward: Stage) -> bool:
    model = type(forward.module)
    return model is type(backward.module) and hasattr(model, HOOK)


class Forward:
    """A forward that is to be run while a backward is.

    Args:
        received: the input, arrived; None on the first stage.
        done: to be called with what `end` returns, as soon as the output is held no more: else it is copied.
    """

    def __init__(
        self,
        stage: Stage,
        received: Transfer | None,
        microbatch: int,
        extra: tuple[bool, ...],
        done: Callable[[Made], None],
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.received = received
        self.done = done
        self._extra = extra
        self._inputs = stage.take_input(received)

    def begin(self) -> tuple[Any, Any]:
        """Returns what `Stage.begin` returns."""
        return self.stage.begin(self.microbatch, *self._extra)

    def end(self, output: Any, loss_func: Any) -> Made:
        return self.stage.end(self._inputs, output, loss_func, self.microbatch)

    def save(self, output: Any, loss: Loss | None) -> Made:
        """Instead of `end`, where the loss has been computed."""
        return self.stage.save(self._inputs, output, loss, self.microbatch)


def run_pair(
    forward: Forward,
    backward: Stage,
    in_flight: SavedForward,
    output_grads: list[Tensor] | None,
    deferred: DeferredGrads,
) -> list[Tensor]:
    """Run both in segments, without W. Returns what `Stage.backward` returns.

    A forward that `forward_step_func` has run by itself is not overlapped.

    Args:
        output_grads: gradients of the backward's outputs that want one; None on the last stage.
    """
    output, loss_func = forward.begin()

    def end() -> None:
        nonlocal output
        made, output = forward.end(output, loss_func), None
        forward.done(made)

    if not isinstance(output, Segments):
        end()

    def advance() -> None:
        if output is None:
            deferred.compute()
            return
        before = forward.stage.hand_over(forward.received)  # the backward may be of the same chunk
        if not output.advance():
            with torch.enable_grad():  # this may be inside of the backward
                end()
        forward.stage.hand_over(before)

    # The forward begins in the backward's first window, so one computes whenever the other's data is on its way.
    with filling_windows(advance):
        input_grads = backward.backward(in_flight, output_grads, deferred)
    while output is not None:
        advance()
    return input_grads


def run_alone(
    backward: Stage, in_flight: SavedForward, output_grads: list[Tensor] | None, deferred: DeferredGrads
) -> list[Tensor]:
    """Run a backward, and in its overlap windows the weight gradients that it has deferred so far. Returns what
    `Stage.backward` returns."""
    with filling_windows(deferred.compute):
        return backward.backward(in_flight, output_grads, deferred)


def run_pair_by_hook(
    forward: Forward, backward: Stage, in_flight: SavedForward, output_grads: list[Tensor] | None
) -> list[Tensor]:
    """Run both in the model's way, W included. Returns what `Stage.backward` returns.

    DualPipe's hook takes tensors where a pipeline keeps only the graph behind them: the engine and
    `torch.autograd.backward` take edges of it as well. A forward that `forward_step_func` has run by itself is not
    overlapped.

    Raises:
        TypeError: `in_segments` was given keyword arguments.
    """
    stage = forward.stage
    call, loss_func = forward.begin()
    if not isinstance(call, Segments):
        forward.done(forward.end(call, loss_func))
        return backward.backward(in_flight, output_grads)
    if call.kwargs:
        raise TypeError(
            f"{type(stage.module).__name__}.{HOOK} takes the model's inputs in their order, so forward_step_func must "
            "give them without keywords: return in_segments(model, *inputs), loss_func."
        )
    losses: list[Loss | None] = []

    def criterion(*outputs: Any) -> Tensor:
        loss = stage.compute_loss(_unpacked(outputs), loss_func)
        losses.append(loss)
        return torch.zeros(()) if loss is None else loss.tensor

    roots = backward.roots(in_flight, output_grads)
    is_last = backward.info.is_last
    hook = getattr(type(stage.module), HOOK)
    # A hook that overlaps a chunk with itself sees the input of its forward.
    before = None if backward is stage else backward.hand_over(in_flight.received)
    delayed = backward.delayed_grads()
    with deferring(None):
        outputs, _ = hook(
            _InAutocast(stage),
            list(call.args),
            criterion if stage.info.is_last else None,
            [],
            backward.module,
            _HookLoss(roots) if is_last else None,
            [] if is_last else [edge for edge, _ in roots],
            [] if is_last else [grad for _, grad in roots],
        )
    if backward is not stage:
        backward.hand_over(before)
    output = _unpacked(outputs)
    made = forward.save(output, losses[0] if losses else stage.compute_loss(output, loss_func))
    del output, outputs
    forward.done(made)
    if delayed is not None:
        delayed.end_backward(bool(roots))
        delayed.compute()
    return backward.input_grads(in_flight, bool(roots))


def _unpacked(outputs: Any) -> Any:
    return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs


class _InAutocast:
    """A stage's module, which runs under autocast, while the loss and the backward around it do not."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(self, *args: Any) -> Any:
        with self._stage.autocast():
            return self._stage.module(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.module, name)


class _HookLoss:
    """The methods of a loss that such a hook uses."""

    def __init__(self, roots: list[tuple[GradientEdge, Tensor]]) -> None:
        self._roots = roots

    def backward(self) -> None:
        if self._roots:
            run_backward(*zip(*self._roots))

    def detach_(self) -> _HookLoss:
        return self
