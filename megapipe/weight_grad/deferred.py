"""What one B puts off, and the W that catches up on it.

During a B everything that is handed to `defer` is kept in a list, its W; in any other backward it runs at once. The
list in use is a plain module variable behind a lock, since autograd runs backward in threads of its own, which see no
thread-local or context variable of the thread that asked for it.
"""

from __future__ import annotations

import ctypes
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
    "DeferredGrads",
    "SavedTensor",
    "add_gradient",
    "capturing",
    "defer",
    "deferring",
    "has_main_grad",
    "is_capturing",
    "is_deferring",
    "keep",
    "one_backward_at_a_time",
    "unshared",
    "visit_gradient_nodes",
]

one_backward_at_a_time = threading.RLock()
_current: DeferredGrads | None = None
_is_capturing = False
_stand_ins: dict[Tensor, Tensor] | None = None  # gradients that stand in during the backward under way, if one is


class DeferredGrads:
    """The weight gradients that one B leaves to its W.

    On CPU they are torch's own: what a backward contributes to a weight is added up first, in the order in which
    autograd would, and then to what is there. On other devices each is added in place, as it comes.

    Hooks of the weights are silent while B runs: autograd may call them although their gradient is still to come.
    """

    def __init__(self) -> None:
        # By autograd's number of the backward: B itself, and those that run within it (reentrant checkpoints).
        self._running: dict[int, dict[Tensor, _Contributions]] = {}
        self._ended: dict[int, dict[Tensor, _Contributions]] = {}
        self._silenced: dict[Tensor, dict[Any, Any]] = {}
        self._kept: list[weakref[SavedTensor]] = []

    def is_under_way(self) -> bool:
        """Whether the backward that is running is this B, or one within it, and not that of another thread."""
        if torch._C._current_graph_task_id() in self._running:
            return True
        return _this_thread().deferred is self

    def add(
        self, weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None = None
    ) -> None:
        number = torch._C._current_graph_task_id()
        if number not in self._running:
            self._running[number] = {}
            if number != -1:  # which is outside of any backward
                Variable._execution_engine.queue_callback(functools.partial(self._end, number))
        contributions = self._running[number]
        if weight not in contributions:
            contributions[weight] = _Contributions(weight)
            self.silence(weight)
        contributions[weight].left.append((compute, add_to))

    def silence(self, weight: Tensor) -> None:
        hooks = _post_accumulate_hooks(weight)
        if hooks and weight not in self._silenced:
            self._silenced[weight] = dict(hooks)
            hooks.clear()

    def keep(self, kept: SavedTensor) -> None:
        self._kept.append(weakref(kept))

    def _end(self, number: int) -> None:
        """Called by autograd at the end of a backward. What nobody but B itself runs can wait for W; whoever runs
        another, in a Function of theirs or in a gap, is about to look at its gradients."""
        self._settle(number)
        within = torch._C._current_autograd_node()
        if within is not None and "Checkpoint" not in type(within).__name__:
            done = {since: self._ended.pop(since) for since in list(self._ended) if since >= number}
            self.restore_hooks(*(weight for contributions in done.values() for weight in contributions))
            _accumulate_all(done)

    def _settle(self, number: int) -> None:
        contributions = self._ended[number] = self._running.pop(number)
        for contribution in contributions.values():
            contribution.end()

    def end_backward(self) -> None:
        """At the end of B: give the hooks back, and copy what others keep as well."""
        for number in list(self._running):  # that did not end, because of an error
            self._settle(number)
        self.restore_hooks()
        kept_of: dict[int, tuple[torch.UntypedStorage, list[SavedTensor]]] = {}  # per memory that others have too
        for kept in filter(None, [reference() for reference in self._kept]):  # those that are still to be used
            storage = kept.get().untyped_storage()
            if _may_be_shared(storage):
                kept_of.setdefault(storage._cdata, (storage, []))[1].append(kept)
        self._kept.clear()
        for storage, all_kept in kept_of.values():
            if _is_shared(storage, [kept.get() for kept in all_kept]):
                for kept in all_kept:
                    kept.copy()

    def restore_hooks(self, *weights: Tensor) -> None:
        """Of these weights, or of all."""
        for weight in weights or list(self._silenced):
            _post_accumulate_hooks(weight).update(self._silenced.pop(weight, {}))

    def compute(self) -> None:
        """Compute what has been put off so far. B may not have ended yet."""
        with _without_grad():
            for contributions in (*self._ended.values(), *self._running.values()):
                for contribution in contributions.values():
                    contribution.compute()

    def run(self) -> None:
        """W: compute what is left, add it to the gradients, and call each weight's hooks once."""
        for number in list(self._running):
            self._settle(number)
        ended, self._ended = self._ended, {}
        _accumulate_all(ended)


class _Thread:
    deferred: DeferredGrads | None = None


def _this_thread() -> _Thread:
    """What is kept for a thread by torch, whose own thread-locals go along to the threads that run its backward."""
    if not torch._C._is_key_in_tls(_KEY):
        made = _Thread()
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # torch before 2.13 or so does not count its reference
        torch._C._stash_obj_in_tls(_KEY, made)
    return torch._C._get_obj_in_tls(_KEY)  # type: ignore[no-any-return]


_KEY = "megapipe.weight_grad"


class _Contributions:
    """What one backward contributes to one weight.

    On CPU `.grad` is set aside meanwhile, so that what autograd adds there by itself, where something else uses the
    weight too, is found to be one of them.
    """

    def __init__(self, weight: Tensor) -> None:
        self.left: deque[tuple[Callable[[], Tensor], Callable[[Tensor], object] | None]] = deque()
        self._weight = weight
        self._sum: Tensor | None = None
        self._before: Tensor | None = None
        self._adds_up = weight.is_cpu
        self._is_aside = self._adds_up and _main_grad(weight) is None
        if self._is_aside:
            self._before, weight.grad = weight.grad, None
        _let_stand_in(weight)

    def end(self) -> None:
        if self._is_aside:
            by_autograd, self._weight.grad = self._weight.grad, self._before
            self._is_aside, self._before = False, None
            if by_autograd is not None:
                self.left.append((lambda: by_autograd, None))

    def compute(self) -> None:
        while self.left:
            compute, add_to = self.left.popleft()
            if not self._adds_up:
                _accumulate(self._weight, compute, add_to)
                continue
            grad = _gradient(self._weight, compute, is_ours=add_to is not None)
            self._sum = grad if self._sum is None else self._sum + grad

    def accumulate(self) -> None:
        if self._sum is None and len(self.left) == 1:
            _accumulate(self._weight, *self.left.popleft())
            return
        self.compute()
        if self._sum is not None:
            add_gradient(self._weight, self._sum)


def _accumulate_all(ended: dict[int, dict[Tensor, _Contributions]]) -> None:
    """Hooks are called once for each weight."""
    computed: dict[Tensor, None] = {}
    with _without_grad():
        for contributions in ended.values():
            while contributions:  # what is done with is freed before the next one allocates
                weight = next(iter(contributions))
                contributions.pop(weight).accumulate()
                computed[weight] = None
    for weight in computed:
        _call_hooks(weight)


class _without_grad:  # noqa: N801  # torch.no_grad() takes longer than a small gradient
    def __enter__(self) -> None:
        self._was_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        torch._C._set_grad_enabled(self._was_enabled)


class deferring:  # noqa: N801  # a context; a generator would take longer than a small backward
    """Around one backward: what it hands to `defer` goes to `deferred`; with None it runs at once.

    Two pipelines in one process take turns, so neither finds its gradients in the other's list.
    """

    def __init__(self, deferred: DeferredGrads | None) -> None:
        self._deferred = deferred

    def __enter__(self) -> None:
        global _current, _stand_ins
        one_backward_at_a_time.acquire()
        self._before, _current = (_current, _stand_ins), self._deferred
        _stand_ins = {}
        _this_thread().deferred = _current

    def __exit__(self, *error: object) -> None:
        global _current, _stand_ins
        try:
            if _stand_ins:
                _remove_stand_ins(_stand_ins)
            _current, _stand_ins = self._before
            _this_thread().deferred = _current
            if self._deferred is not None:
                self._deferred.end_backward()
        finally:
            one_backward_at_a_time.release()


def is_deferring() -> bool:
    """Whether the backward that is running leaves weight gradients to a W."""
    return _current is not None and _current.is_under_way()


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


def defer(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None = None) -> None:
    """Leave the gradient of `weight` to W, from the backward of a custom autograd Function.

    The Function returns None for the weight's gradient. It runs at once unless a schedule has split this backward.
    The gradient is added to `weight.main_grad` where the owner made one, else to `weight.grad`, and the weight's
    post-accumulate-grad hooks are called once per microbatch. Hooks that add to a `main_grad` by themselves find it in
    `.grad`, unless the weight has `grad_added_to_main_grad`, as Megatron's have, which is set to True for them. Tensor
    hooks are called for each gradient deferred; a Function that returns the gradient of a weight with such hooks gives
    them the sum. A frozen weight is left alone.

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
        compute, add_to = functools.partial(_hooked, weight, compute), None
    if _current is not None and _current.is_under_way():
        _current.add(weight, compute, add_to)
        return
    _let_stand_in(weight)
    with _without_grad():
        _accumulate(weight, compute, add_to)
    if _post_accumulate_hooks(weight) and not _autograd_calls_hooks_without_gradient():
        _call_hooks_after_backward(weight)


class SavedTensor:
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


def keep(grad: Tensor) -> SavedTensor:
    """For what is handed to `defer`: `grad` as it is now.

    Autograd may make a view of the same memory some parameter's `.grad`, as in `layer(x) + position.view(...)`, and
    add the gradients of the next microbatches to it in place. So where others still hold the memory when B ends, it is
    copied then; while B runs they cannot be told from those who only pass it on.
    """
    kept = SavedTensor(grad)
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
    silent = DeferredGrads()
    added = {weight: weight.grad_added_to_main_grad for weight in weights if hasattr(weight, "grad_added_to_main_grad")}
    with deferring(None):
        try:
            for weight in weights:
                _let_stand_in(weight)
                silent.silence(weight)
            _Visit.apply(*weights).backward()  # type: ignore[no-untyped-call]
        finally:
            silent.restore_hooks()
            for weight, was_added in added.items():
                weight.grad_added_to_main_grad = was_added


def _let_stand_in(weight: Tensor) -> None:
    """Megatron's hooks, where reductions overlap, insist on a gradient to find when autograd has passed by, also where
    they are told that what there is has been added to `main_grad`. So zeros without memory stand in for it."""
    if _stand_ins is not None and weight.grad is None and _main_grad(weight) is not None:
        weight.grad = _stand_ins[weight] = weight.new_zeros(()).expand_as(weight)
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]


def _remove_stand_ins(stand_ins: dict[Tensor, Tensor]) -> None:
    """Those that no hook has taken away."""
    for weight, zeros in stand_ins.items():
        if weight.grad is zeros:
            weight.grad = None


def has_main_grad(weight: Tensor) -> bool:
    """Whether its gradient is to be added to its `main_grad`."""
    return _main_grad(weight) is not None


def _main_grad(weight: Tensor) -> Tensor | None:
    """None also where hooks of the owner's take the gradient from `.grad` and add it themselves: those that do not ask
    `grad_added_to_main_grad`, as Megatron's do, whether that has been done."""
    main_grad: Tensor | None = getattr(weight, "main_grad", None)
    if main_grad is None or hasattr(weight, "grad_added_to_main_grad") or not _post_accumulate_hooks(weight):
        return main_grad
    return None


def add_gradient(weight: Tensor, grad: Tensor) -> None:
    """Add what somebody has computed for one microbatch, and keeps no other use of, to `main_grad` or `.grad`."""
    with _without_grad():
        _accumulate(weight, lambda: grad, lambda target: target.add_(grad))


def _accumulate(weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None) -> None:
    main_grad = _main_grad(weight)
    target = weight.grad if main_grad is None else main_grad
    if target is None:
        weight.grad = _gradient(weight, compute, is_ours=add_to is not None)
    elif add_to is not None:
        add_to(target)
    else:
        target.add_(compute())
    if main_grad is not None:
        weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]  # Megatron's hooks ask for it


def _gradient(weight: Tensor, compute: Callable[[], Tensor], is_ours: bool) -> Tensor:
    """As it may become `.grad`. Nobody else has what our own layers compute. Others may return what they also use
    elsewhere, or expand."""
    grad = compute()
    dtype = getattr(weight, "grad_dtype", weight.dtype) or grad.dtype  # newer torch lets the owner choose, or any
    return grad.to(dtype) if is_ours else grad.to(dtype, copy=True).contiguous()


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
