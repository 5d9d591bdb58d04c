"""Weight gradients that are deferred from B to W.

Layers call `defer(weight, compute)` in the backward of their autograd Function: those of `megapipe.weight_grad`, those
that `weight_grad.convert` has converted, and captured stages. During a B `compute` is stored, and W runs it. In any
other backward it runs at once. Autograd runs once, in B; a layer that does not call `defer` has its weight gradients
computed in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import ref as weakref

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from .accumulation import Contributions, accumulate, accumulate_all, add_dummy_grad, remove_dummy_grads, without_grad
from .aliasing import SavedTensor, copy_shared
from .context import backward_context, this_thread
from .grad_hooks import SilencedHooks, pass_through_weights


class Backward:
    """The context of a backward that defers nothing: weight gradients are computed at once.

    Two pipelines in one process take turns (a lock), so that neither gets the deferred gradients of the other.
    """

    def __enter__(self) -> None:
        context = backward_context
        context.lock.acquire()
        context.outer.append((context.deferred, context.dummy_grads))
        context.deferred, context.dummy_grads = None, {}

    def __exit__(self, *error: object) -> None:
        context = backward_context
        try:
            if context.dummy_grads:
                remove_dummy_grads(context.dummy_grads)
            context.deferred, context.dummy_grads = context.outer.pop()
        finally:
            context.lock.release()


AT_ONCE = Backward()
"""The context of all backwards that are not split into B and W."""


class DeferredGrads(Backward):
    """The weight gradients that one B defers to its W. It is the context of that B: layers add to it by `defer`.

    On CPU they are equal to torch's: the contributions of a backward to a weight are added up first, in autograd's
    order, and then added to the gradient. On other devices each is added in place, as it comes.

    Hooks of the weights are silenced while B runs: autograd may call them although the gradient is not complete.
    """

    def __init__(self) -> None:
        self.saved: list[weakref[SavedTensor]] = []
        """Tensors that may have to be copied when B ends."""
        # By the id of autograd's graph task: B itself, and backwards that run within it (reentrant checkpoints). In
        # each by the identity of the weight, since the hash of a tensor is a function of Python.
        self._running: dict[int, dict[int, Contributions]] = {}
        self._ended: dict[int, dict[int, Contributions]] = {}
        self._silenced = SilencedHooks()

    def __enter__(self) -> None:
        super().__enter__()
        backward_context.deferred = self
        self._thread = this_thread()
        self._before_on_thread, self._thread.deferred = self._thread.deferred, self

    def __exit__(self, *error: object) -> None:
        self._thread.deferred = self._before_on_thread
        try:
            self._end_backward()
        finally:
            super().__exit__(*error)

    def is_empty(self) -> bool:
        """Whether no weight gradient is deferred."""
        return not self._running and not self._ended

    def is_under_way(self) -> bool:
        """Whether the current thread is running this B, or a backward within it."""
        if torch._C._current_graph_task_id() in self._running:
            return True
        return this_thread().deferred is self

    def add(
        self, weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None = None
    ) -> None:
        """Store a weight gradient for W. `defer` explains the arguments."""
        task_id = torch._C._current_graph_task_id()
        if task_id not in self._running:
            self._running[task_id] = {}
            if task_id != -1:  # -1 is outside of any backward
                Variable._execution_engine.queue_callback(functools.partial(self._end, task_id))
        to_weights = self._running[task_id]
        contributions = to_weights.get(id(weight))
        if contributions is None:
            contributions = to_weights[id(weight)] = Contributions(weight)
            self._silenced.silence(weight)
        contributions.left.append((compute, add_to))

    def _end(self, task_id: int) -> None:
        """Called by autograd when a run of it ends. The gradients of B itself wait for W.

        A backward within B, run by a Function or in an overlap window, must have its gradients at once, since its
        caller may read them. Gradients of checkpoints can wait: the Function has `ctx.leaves_weight_grads`, or is in
        `CHECKPOINTS`."""
        self._finalize(task_id)
        within = torch._C._current_autograd_node()
        can_wait = within is None or hasattr(within, "leaves_weight_grads") or _is_checkpoint(within)
        if not can_wait:
            done = {since: self._ended.pop(since) for since in list(self._ended) if since >= task_id}
            self._silenced.restore(*(one.weight for contributions in done.values() for one in contributions.values()))
            accumulate_all(done)

    def _finalize(self, task_id: int) -> None:
        contributions = self._ended[task_id] = self._running.pop(task_id)
        for contribution in contributions.values():
            contribution.end()

    def _end_backward(self) -> None:
        """End B: give the hooks back, and copy saved tensors whose memory others hold too."""
        for task_id in list(self._running):  # backwards that an error has ended
            self._finalize(task_id)
        self._silenced.restore()
        copy_shared(self.saved)
        self.saved.clear()

    def compute_next(self) -> bool:
        """Compute the oldest deferred gradient: of layers it is one matrix product. Called in overlap windows, also
        while B is still running. Returns False if none is left."""
        with without_grad():
            return any(
                contribution.compute_next()
                for contributions in (*self._ended.values(), *self._running.values())
                for contribution in contributions.values()
            )

    def run(self) -> None:
        """W: compute all remaining gradients, add them to the weights' gradients, and call each weight's hooks once."""
        for task_id in list(self._running):
            self._finalize(task_id)
        ended, self._ended = self._ended, {}
        accumulate_all(ended)


CHECKPOINTS = {
    "torch.utils.checkpoint.CheckpointFunction",
    "transformer_engine.pytorch.distributed._CheckpointFunction",
    "deepspeed.runtime.activation_checkpointing.checkpointing.CheckpointFunction",
}
"""Functions whose backward runs another backward and does not read its weight gradients. Integrations add theirs; other
Functions set `ctx.leaves_weight_grads`."""


def _is_checkpoint(node: Any) -> bool:
    function = getattr(type(node), "_forward_cls", None)
    return function is not None and f"{function.__module__}.{function.__qualname__}" in CHECKPOINTS


def deferring_to() -> DeferredGrads | None:
    """Returns the `DeferredGrads` of the B that is running; None outside of a B."""
    deferred: DeferredGrads | None = backward_context.deferred
    return deferred if deferred is not None and deferred.is_under_way() else None


def is_capturing() -> bool:
    """Whether a stage is being captured as a graph (megapipe.graph): Functions return all gradients then."""
    return backward_context.is_capturing


@contextmanager
def capturing() -> Iterator[None]:
    """The context in which a stage is captured: nothing can be deferred."""
    with backward_context.lock:
        before, backward_context.is_capturing = backward_context.is_capturing, True
        try:
            yield
        finally:
            backward_context.is_capturing = before


def defer(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None = None) -> None:
    """Defer the gradient of `weight` to W. Called in the backward of a custom autograd Function.

    The Function returns None for the weight's gradient. The gradient is computed at once unless the schedule has split
    this backward. It is added to `weight.main_grad` if the owner made one, else to `weight.grad`, and the weight's
    post-accumulate-grad hooks are called once per microbatch. Hooks that add to a `main_grad` by themselves find the
    gradient in `.grad`, unless the weight has `grad_added_to_main_grad`, as Megatron's have, which is set to True for
    them. A frozen weight is left alone.

    Args:
        weight: the parameter itself: not the one among `ctx.saved_tensors`, which is a copy of it under activation
            checkpointing. If it is a leaf tensor but no nn.Parameter, its gradient is computed at once: it is an input
            of the stage, or kept by an earlier slice, and B returns its gradient.
        compute: returns the gradient, in the shape of `weight`; its dtype is converted. It runs on the compute stream,
            without gradients recorded, and keeps alive everything that it refers to until W.
        add_to: adds the gradient to the tensor that it is given, which has the weight's shape but perhaps another
            dtype. Worth giving if that is cheaper than `compute` and an addition.

    Raises:
        TypeError: the weight is no leaf, so its gradient belongs to the tensors that it was made from; it has tensor
            hooks (`register_hook`), which must see the gradient before it is added; or a stage is being captured as a
            graph, which has all gradients in it (return the gradient if `is_capturing()`).
    """
    if backward_context.is_capturing:
        raise TypeError(
            f"defer was given a weight of shape {list(weight.shape)} while a stage is captured as a graph, which "
            "defers weight gradients by itself: return the gradient from the Function's backward where "
            "weight_grad.is_capturing()."
        )
    if not weight.is_leaf:
        raise TypeError(
            f"defer was given a tensor of shape {list(weight.shape)} that was computed from others, so it keeps no "
            "gradient: defer that of the parameter itself, or return the gradient from the Function's backward."
        )
    if not weight.requires_grad:
        return
    if weight._backward_hooks:
        raise TypeError(
            f"defer was given a weight of shape {list(weight.shape)} with tensor hooks (register_hook), which must see "
            "its gradient before it is added: return the gradient from the Function's backward, or use "
            "register_post_accumulate_grad_hook."
        )
    deferred = deferring_to()
    if deferred is not None and isinstance(weight, nn.Parameter):
        deferred.add(weight, compute, add_to)
        return
    add_dummy_grad(weight)
    with without_grad():
        accumulate(weight, compute, add_to)


def visit_gradient_nodes(weights: list[Tensor]) -> None:
    """Let autograd pass by the leaves once more, without a gradient. For those who watch the nodes that accumulate it,
    as Megatron's and torch's DistributedDataParallel do: when B passed by, the gradient was not complete."""
    if not weights:
        return
    silenced = SilencedHooks()
    added = {weight: weight.grad_added_to_main_grad for weight in weights if hasattr(weight, "grad_added_to_main_grad")}
    with AT_ONCE:
        try:
            for weight in weights:
                add_dummy_grad(weight)
                silenced.silence(weight)
            pass_through_weights(*weights)
        finally:
            silenced.restore()
            for weight, was_added in added.items():
                weight.grad_added_to_main_grad = was_added
