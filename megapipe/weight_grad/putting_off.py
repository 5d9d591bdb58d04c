"""What one B puts off, and the W that catches up on it.

During a B everything that is handed to `defer` is kept in a list, its W; in any other backward it runs at once. The
list in use is a plain module variable behind a lock, since autograd runs backward in threads of its own, which see no
thread-local or context variable of the thread that asked for it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary
from weakref import ref as weakref

import torch
from torch import Tensor
from torch.autograd import Variable

__all__ = [
    "Kept",
    "PutOff",
    "capturing",
    "defer",
    "is_capturing",
    "is_putting_off",
    "keep",
    "one_backward_at_a_time",
    "putting_off",
    "unshared",
    "visit_gradient_nodes",
]

one_backward_at_a_time = threading.RLock()
_current: PutOff | None = None
_is_capturing = False
_stand_ins: dict[Tensor, Tensor] | None = None  # gradients that stand in during the backward under way, if one is


class PutOff:
    """The weight gradients that one B leaves to its W, in the order in which they were put off.

    Hooks of the weights are silent while B runs: autograd may call them although their gradient is still to come.
    """

    def __init__(self) -> None:
        self._computations: deque[tuple[Tensor, Callable[[], Tensor], Callable[[Tensor], None] | None]] = deque()
        self._computed: dict[Tensor, None] = {}  # weights whose hooks are to be called
        self._silenced: dict[Tensor, dict[Any, Any]] = {}
        self._kept: list[weakref[Kept]] = []

    def add(
        self, weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], None] | None = None
    ) -> None:
        self._computations.append((weight, compute, add_to))
        self.silence(weight)

    def silence(self, weight: Tensor) -> None:
        hooks = _post_accumulate_hooks(weight)
        if hooks and weight not in self._silenced:
            self._silenced[weight] = dict(hooks)
            hooks.clear()

    def keep(self, kept: Kept) -> None:
        self._kept.append(weakref(kept))

    def end_backward(self) -> None:
        """At the end of B: give the hooks back, and copy what others keep as well."""
        self.restore_hooks()
        kept_of: dict[int, tuple[torch.UntypedStorage, list[Kept]]] = {}  # per memory that others have too
        for kept in filter(None, [reference() for reference in self._kept]):  # those that are still to be used
            storage = kept.get().untyped_storage()
            if _may_be_shared(storage):
                kept_of.setdefault(storage._cdata, (storage, []))[1].append(kept)
        self._kept.clear()
        for storage, all_kept in kept_of.values():
            if _is_shared(storage, [kept.get() for kept in all_kept]):
                for kept in all_kept:
                    kept.copy()

    def restore_hooks(self) -> None:
        for weight, hooks in self._silenced.items():
            _post_accumulate_hooks(weight).update(hooks)
        self._silenced.clear()

    def compute(self) -> None:
        """Compute what has been put off so far, and add it to the gradients. B may not have ended yet."""
        was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # torch.no_grad() would take longer than a small gradient
        try:
            while self._computations:  # what is done with is freed before the next one allocates
                weight, compute, add_to = self._computations.popleft()
                _accumulate(weight, compute, add_to)
                self._computed[weight] = None
        finally:
            torch._C._set_grad_enabled(was_enabled)

    def run(self) -> None:
        """W: compute what is left, and call each weight's hooks once."""
        self.compute()
        weights, self._computed = self._computed, {}
        for weight in weights:
            _call_hooks(weight)


class putting_off:  # noqa: N801  # a context; a generator would take longer than a small backward
    """Around one backward: what it hands to `defer` goes to `put_off`; with None it runs at once.

    Two pipelines in one process take turns, so neither finds its gradients in the other's list.
    """

    def __init__(self, put_off: PutOff | None) -> None:
        self._put_off = put_off

    def __enter__(self) -> None:
        global _current, _stand_ins
        one_backward_at_a_time.acquire()
        self._before, _current = (_current, _stand_ins), self._put_off
        _stand_ins = {}

    def __exit__(self, *error: object) -> None:
        global _current, _stand_ins
        try:
            if _stand_ins:
                _remove_stand_ins(_stand_ins)
            _current, _stand_ins = self._before
            if self._put_off is not None:
                self._put_off.end_backward()
        finally:
            one_backward_at_a_time.release()


def is_putting_off() -> bool:
    """Whether the backward that is running leaves weight gradients to a W."""
    return _current is not None


def is_capturing() -> bool:
    """Whether a stage is being captured as a graph (megapipe.graph): Functions return all gradients then."""
    return _is_capturing


@contextmanager
def capturing() -> Iterator[None]:
    """Around the capture of a stage: nothing is to be deferred."""
    global _is_capturing
    with one_backward_at_a_time:
        before, _is_capturing = _is_capturing, True
        try:
            yield
        finally:
            _is_capturing = before


def defer(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], None] | None = None) -> None:
    """Leave the gradient of `weight` to W, from the backward of a custom autograd Function.

    The Function returns None for the weight's gradient. It runs at once unless a schedule has split this backward.
    The gradient is added to `weight.main_grad` where the owner made one, else to `weight.grad`, and the weight's
    post-accumulate-grad hooks are called once per microbatch. Its tensor hooks are called for each gradient deferred; a
    Function that returns the gradient of a weight with such hooks gives them the sum. A frozen weight is left alone.

    Args:
        weight: a leaf tensor, the parameter itself: not the one among `ctx.saved_tensors`, which is a copy of it under
            activation checkpointing.
        compute: returns the gradient. It keeps alive what it refers to until W, so let that be what it needs.
        add_to: adds the gradient to the tensor that it is given, which has the weight's shape but perhaps another
            dtype. Worth giving where that is cheaper than `compute` and an addition.

    Raises TypeError where the weight is no leaf: its gradient belongs to the tensors that it was made from; and while a
    stage is captured as a graph, which has all gradients in it: return the gradient if `is_capturing()`.
    """
    if _is_capturing:
        raise TypeError(
            f"defer was given a weight of shape {list(weight.shape)} while a stage is captured as a graph, which puts "
            "weight gradients off by itself: return the gradient from the Function's backward where "
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
        _pass_over_none(weight)
    _let_stand_in(weight)
    if _current is not None:
        _current.add(weight, compute, add_to)
        return
    with torch.no_grad():
        _accumulate(weight, compute, add_to)
    if _post_accumulate_hooks(weight) and not _autograd_calls_hooks_without_gradient():
        _call_hooks_after_backward(weight)


class Kept:
    """A tensor that a layer keeps until W. As in autograd, it is an error to change it in place before."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._version = tensor._version

    def get(self) -> Tensor:
        if self._tensor._version != self._version:
            raise RuntimeError(
                f"a tensor of shape {list(self._tensor.shape)}, which a layer needs for its weight gradient, was "
                "changed in place between its B and its W: give each microbatch in flight memory of its own, or use a "
                "layer that defers nothing."
            )
        return self._tensor

    def copy(self) -> None:
        self._tensor = self.get().clone()
        self._version = self._tensor._version


def keep(grad: Tensor) -> Kept:
    """For what is handed to `defer`: `grad` as it is now.

    Autograd may make a view of the same memory some parameter's `.grad`, as in `layer(x) + position.view(...)`, and
    add the gradients of the next microbatches to it in place. So where others still hold the memory when B ends, it is
    copied then; while B runs they cannot be told from those who only pass it on.
    """
    kept = Kept(grad)
    if _current is not None:
        _current.keep(kept)
    return kept


def unshared(grad: Tensor) -> Tensor:
    """`grad`, or a copy where others hold its memory: see `keep`. For an input's gradient, which is yet to be sent."""
    storage = grad.untyped_storage()
    return grad.clone() if _may_be_shared(storage) and _is_shared(storage, [grad]) else grad


def _may_be_shared(storage: torch.UntypedStorage) -> bool:
    """Not where there is but one tensor, which is quickly told."""
    return torch._C._storage_Use_Count(storage._cdata) > 2  # one is `storage`


def _is_shared(storage: torch.UntypedStorage, tensors: list[Tensor]) -> bool:
    """Whether anybody but these tensors, and those that they are views of, holds this memory of theirs."""
    ours = {id(tensor): tensor for tensor in tensors + [tensor._base for tensor in tensors]}
    ours.pop(id(None), None)  # what is no view has no base
    return torch._C._storage_Use_Count(storage._cdata) > len(ours) + 1  # one is `storage`


def visit_gradient_nodes(weights: list[Tensor]) -> None:
    """Let autograd pass by the leaves once more, without a gradient, for those who watch the nodes that accumulate it,
    as Megatron's and torch's DistributedDataParallel do: when B passed by, the gradient was not complete."""
    if not weights:
        return
    silent = PutOff()
    added = {weight: weight.grad_added_to_main_grad for weight in weights if hasattr(weight, "grad_added_to_main_grad")}
    with putting_off(None):
        try:
            for weight in weights:
                silent.silence(weight)
                _let_stand_in(weight)
            _Visit.apply(*weights).backward()  # type: ignore[no-untyped-call]
        finally:
            silent.restore_hooks()
            for weight, was_added in added.items():
                weight.grad_added_to_main_grad = was_added


def _let_stand_in(weight: Tensor) -> None:
    """Megatron's hooks, where reductions overlap, insist on a gradient to find when autograd has passed by, also where
    they are told that what there is has been added to `main_grad`. So zeros without memory stand in for it."""
    if _stand_ins is not None and weight.grad is None and getattr(weight, "main_grad", None) is not None:
        weight.grad = _stand_ins[weight] = weight.new_zeros(()).expand_as(weight)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _remove_stand_ins(stand_ins: dict[Tensor, Tensor]) -> None:
    """Those that no hook has taken away."""
    for weight, zeros in stand_ins.items():
        if weight.grad is zeros:
            weight.grad = None


def _accumulate(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], None] | None) -> None:
    main_grad = getattr(weight, "main_grad", None)
    target = weight.grad if main_grad is None else main_grad
    if weight._backward_hooks:  # these want to see, and may change, the gradient of one microbatch by itself
        compute, add_to = functools.partial(_hooked, weight, compute), None
    if target is None:
        grad = compute()
        # Nobody else has what our own layers compute. Others may return what they also use elsewhere, or expand.
        weight.grad = grad if add_to is not None else grad.to(weight.dtype, copy=True).contiguous()
    elif add_to is not None:
        add_to(target)
    else:
        target.add_(compute())
    if main_grad is not None:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's hooks ask for it


def _hooked(weight: Tensor, compute: Callable[[], Tensor]) -> Tensor:
    grad = compute()
    assert weight._backward_hooks is not None
    for hook in list(weight._backward_hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _pass_over_none(weight: Tensor) -> None:
    """Autograd calls tensor hooks with None where a Function returned no gradient, which they are not written for."""
    hooks = weight._backward_hooks
    assert hooks is not None
    for key, hook in hooks.items():
        if not isinstance(hook, _UnlessNone):
            hooks[key] = _UnlessNone(hook)


class _UnlessNone:
    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else self._hook(grad)


def _post_accumulate_hooks(weight: Tensor) -> dict[Any, Any]:
    """The very dict that autograd goes by."""
    hooks = getattr(weight, "_post_accumulate_grad_hooks", None)
    return {} if hooks is None else hooks


def _call_hooks(weight: Tensor) -> None:
    for key, hook in list(_post_accumulate_hooks(weight).items()):
        if key != _NOTE:
            hook(weight)


def _call_hooks_after_backward(weight: Tensor) -> None:
    """Once, when the backward that is running ends, however often it uses the weight; unless autograd calls them, which
    it does where something else returns a gradient for the weight."""
    task = torch._C._current_graph_task_id()
    if task == -1:  # called outside of any backward
        _call_hooks(weight)
        return
    to_call = _to_call.get(task)
    if to_call is None:
        _to_call[task] = to_call = _HooksToCall()
        Variable._execution_engine.queue_callback(to_call)
    to_call.weights[weight] = None
    _post_accumulate_hooks(weight)[_NOTE] = _note_call


class _HooksToCall:
    """The weights whose hooks are to be called when a backward ends. That backward owns it, should it fail."""

    def __init__(self) -> None:
        self.weights: dict[Tensor, None] = {}

    def __call__(self) -> None:
        for weight in self.weights:
            _call_hooks(weight)


_to_call: WeakValueDictionary[int, _HooksToCall] = WeakValueDictionary()
_NOTE = "megapipe"  # a key among the hooks, which torch numbers


def _note_call(weight: Tensor) -> None:
    """A hook itself: autograd has called the others."""
    to_call = _to_call.get(torch._C._current_graph_task_id())
    if to_call is not None:
        to_call.weights.pop(weight, None)


class _Visit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        ctx.num_weights = len(weights)
        return torch.empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        return (None,) * int(ctx.num_weights)


@functools.cache
def _autograd_calls_hooks_without_gradient() -> bool:
    """Whether this torch calls post-accumulate-grad hooks also where a Function returned None: newer ones do."""
    called: list[Tensor] = []
    leaf = torch.zeros((), requires_grad=True)
    leaf.register_post_accumulate_grad_hook(called.append)  # type: ignore[no-untyped-call]
    with torch.enable_grad():
        _Visit.apply(leaf).backward()  # type: ignore[no-untyped-call]
    return bool(called)
