"""A forward of one stage and a backward of another, overlapped on one thread, in one of two ways.

In the model's own way: its class defines `overlapped_forward_backward`, DualPipe's hook. Or in parts: the stage whose
forward it is defines `forward_parts`, and each is run where the other waits for its communication (overlap/). A
backward without a partner fills its waits with its own weight gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from ..overlap import Parts, call_in_parts, filling_gaps, find_forward_parts, note_call
from ..p2p_communication import Transfer
from ..weight_grad import DeferredGrads, deferring
from .stage import SavedForward, Stage, run_backward

__all__ = ["Forward", "can_overlap", "has_hook", "may_have_gaps", "run_alone", "run_pair", "run_pair_by_hook"]

HOOK = "overlapped_forward_backward"

Made = tuple[Transfer | None, SavedForward | None]


def can_overlap(forward: Stage, backward: Stage) -> bool:
    """Whether the models know how to run such a pair at once."""
    return has_hook(forward, backward) or find_forward_parts(forward.module) is not None


def has_hook(forward: Stage, backward: Stage) -> bool:
    model = type(forward.module)
    return model is type(backward.module) and hasattr(model, HOOK)


class Forward:
    """A forward that is to be run while a backward is.

    Args:
        received: the input, arrived; None on the first stage.
        done: called with what `Stage.forward` returns, as soon as the forward is done.
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
        self.extra = extra
        self.received = received
        self.inputs = stage.take_input(received)
        self._done = done

    def end(self, output: Any, loss: Tensor | None) -> None:
        self._done(self.stage.keep(self.inputs, output, loss, self.microbatch))


def run_pair(
    forward: Forward,
    backward: Stage,
    in_flight: SavedForward,
    output_grads: list[Tensor] | None,
    deferred: DeferredGrads,
) -> list[Tensor]:
    """Run both in parts, without W. Returns what `Stage.backward` returns.

    Args:
        output_grads: gradients of the backward's outputs that want one; None on the last stage.
    """
    generator, conclude = forward.stage.begin(call_in_parts, forward.microbatch, *forward.extra)
    with forward.stage.autocast():
        parts = Parts(generator)
    is_done = False

    def advance() -> None:
        nonlocal is_done
        if is_done:
            deferred.compute()
            return
        before = forward.stage.hand_over(forward.received)  # the backward may be of the same chunk
        if not parts.advance():
            is_done = True
            with torch.enable_grad():  # this may be inside of the backward
                output = parts.finish()
                forward.end(output, conclude(output))
        forward.stage.hand_over(before)

    # The forward begins in the backward's first gap: so one of them computes whenever the other's data is on its way.
    with filling_gaps(advance):
        input_grads = backward.backward(in_flight, output_grads, deferred)
    while not is_done:
        advance()
    return input_grads


_without_gaps: WeakSet[nn.Module] = WeakSet()


def may_have_gaps(backward: Stage) -> bool:
    """Whether to `run_alone` rather than as a whole, where all weight gradients of a backward are kept to its end."""
    return backward.module not in _without_gaps and find_forward_parts(backward.module) is not None


def run_alone(
    backward: Stage, in_flight: SavedForward, output_grads: list[Tensor] | None, deferred: DeferredGrads
) -> list[Tensor]:
    """Run a backward, and in its gaps what it has put off so far. Returns what `Stage.backward` returns."""
    has_gaps = False

    def compute() -> None:
        nonlocal has_gaps
        has_gaps = True
        deferred.compute()

    with filling_gaps(compute):
        input_grads = backward.backward(in_flight, output_grads, deferred)
    if not has_gaps:
        _without_gaps.add(backward.module)
    return input_grads


def run_pair_by_hook(
    forward: Forward, backward: Stage, in_flight: SavedForward, output_grads: list[Tensor] | None
) -> list[Tensor]:
    """Run both in the model's way, W included. Returns what `Stage.backward` returns.

    DualPipe's hook takes tensors where a pipeline keeps only the graph behind them: the engine and
    `torch.autograd.backward` take edges of it as well.
    """
    module = forward.stage.module
    arguments: list[Any] = []

    def call(forward_step_func: Callable[..., Any], data_iterator: Any, module: Any, *extra: Any) -> Any:
        noted, returned = note_call(forward_step_func, data_iterator, module, *extra)
        if noted is None or noted[1]:
            raise TypeError(
                f"{type(module).__name__}.overlapped_forward_backward takes the model's inputs in their order, so "
                "forward_step_func must call the model, and without keywords: return model(*inputs), loss_func."
            )
        arguments.extend(noted[0])
        return returned

    _, conclude = forward.stage.begin(call, forward.microbatch, *forward.extra)
    losses: list[Tensor | None] = []

    def criterion(*outputs: Any) -> Tensor:
        losses.append(conclude(outputs[0] if len(outputs) == 1 else outputs))
        return losses[0] if losses[0] is not None else torch.zeros(())

    roots = backward.roots(in_flight, output_grads)
    is_last = backward.info.is_last
    hook = getattr(type(module), HOOK)
    # A hook that overlaps a chunk with itself sees the input of its forward.
    before = None if backward is forward.stage else backward.hand_over(in_flight.received)
    with deferring(None):
        outputs, _ = hook(
            _InAutocast(forward.stage),
            arguments,
            criterion if forward.stage.info.is_last else None,
            [],
            backward.module,
            _Loss(roots) if is_last else None,
            [] if is_last else [edge for edge, _ in roots],
            [] if is_last else [grad for _, grad in roots],
        )
    if backward is not forward.stage:
        backward.hand_over(before)
    output = outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs
    forward.end(output, losses[0] if losses else conclude(output))
    if roots:
        backward.run_delayed()
    return backward.input_grads(in_flight, bool(roots))


class _InAutocast:
    """A stage's module, which only what it computes itself finds autocast for: not the loss, nor the backward."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __call__(self, *args: Any) -> Any:
        with self._stage.autocast():
            return self._stage.module(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage.module, name)


class _Loss:
    """What a backward hook does with a loss."""

    def __init__(self, roots: list[tuple[GradientEdge, Tensor]]) -> None:
        self._roots = roots

    def backward(self) -> None:
        if self._roots:
            run_backward(*zip(*self._roots))

    def detach_(self) -> _Loss:
        return self
