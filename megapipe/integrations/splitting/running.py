"""One run of a module on fake tensors: which units it calls, and which tensors each call and the output depend on.

A tensor depends on the outputs of units that it was computed of by the code between them, on inputs, and on parameters
that this code reads. What a unit returns depends on that unit alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Call", "CannotSplitError", "Run", "is_container", "run_once", "units_of"]


class CannotSplitError(ValueError):
    """A module that cannot be cut into stages."""


class Call(NamedTuple):
    """A call of a unit."""

    unit: str
    """Its name in the module."""
    reads: frozenset[str]
    """Names of outputs, inputs and parameters."""
    outputs: dict[str, int]
    """Names of the tensors that it returns, with their places among the leaves of what it returns."""
    form: Any
    """What it returned."""
    cost: float
    """Floating-point operations of its forward."""


class Run(NamedTuple):
    """A run of the whole module."""

    calls: list[Call]
    inputs: dict[str, Tensor]
    """Tensors that the module was called with, as they were in the example."""
    reads: frozenset[str]
    """What the output depends on."""


def is_container(module: nn.Module) -> bool:
    return isinstance(module, (nn.ModuleList, nn.Sequential, nn.ModuleDict))


def units_of(model: nn.Module, num_wanted: int) -> list[str]:
    """The names of units: members of lists, and children of what has lists within. Where these are too few, the largest
    are replaced by their children."""
    units = dict(_units_in(model, ""))
    while len(units) < num_wanted:
        divisible = [name for name, unit in units.items() if any(True for _ in unit.children())]
        if not divisible:
            break
        name = max(divisible, key=lambda one: sum(p.numel() for p in units[one].parameters()))
        unit = units.pop(name)
        units.update((f"{name}.{child}", module) for child, module in unit.named_children())
    return list(units)


def _units_in(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if is_container(child):
            yield from ((f"{path}.{key}", member) for key, member in child.named_children())
        elif any(is_container(one) for one in child.modules()):
            yield from _units_in(child, f"{path}.")
        else:
            yield path, child


class _Dependencies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what each tensor depends on, and counts operations.

    Args:
        fixed: buffers outside units, with their names.
    """

    def __init__(self, fixed: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0.0
        self._counts = importlib.import_module("torch.utils.flop_counter").flop_registry
        self._written: dict[Any, frozenset[str]] = {}  # by storage: what was written there through any view
        self._fixed = {_storage(tensor): name for name, tensor in fixed.items()}
        self._kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        reads = self.of((args, kwargs))
        for leaf in pytree.tree_leaves(output):
            if torch.is_tensor(leaf):
                leaf._reads = reads  # type: ignore[attr-defined]
        schema = getattr(func, "_schema", None)  # which functions of functions have not
        for argument, value in zip(() if schema is None else schema.arguments, args):
            if argument.alias_info is not None and argument.alias_info.is_write and torch.is_tensor(value):
                self._write(value, reads)
        count = self._counts.get(getattr(func, "overloadpacket", None))
        if count is not None:
            self.flops += float(count(*args, **kwargs, out_val=output))
        return output

    def _write(self, tensor: Tensor, reads: frozenset[str]) -> None:
        place = _storage(tensor)
        if place in self._fixed:
            raise CannotSplitError(
                f"the code between units writes to the buffer {self._fixed[place]}, which every stage would do: let a "
                "module of its own do so."
            )
        self._written[place] = self._written.get(place, frozenset()) | reads
        self._kept.append(tensor)  # else another one might get its place

    def of(self, values: Any) -> frozenset[str]:
        """What the tensors in `values` depend on.

        Raises:
            CannotSplitError: there may be tensors in an object that is not looked into.
        """
        found: set[str] = set()
        for leaf in pytree.tree_leaves(values):
            if torch.is_tensor(leaf):
                found |= getattr(leaf, "_reads", frozenset()) | self._written.get(_storage(leaf), frozenset())
        return frozenset(found)

    def returned(self, tensor: Tensor, name: str) -> None:
        """A unit has returned a tensor."""
        tensor._reads = frozenset([name])  # type: ignore[attr-defined]
        self._written.pop(_storage(tensor), None)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


PLAIN = (Tensor, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, type(...))


def _check_plain(values: Any, what: str) -> None:
    for leaf in pytree.tree_leaves(values):
        if not isinstance(leaf, PLAIN):
            raise CannotSplitError(
                f"{what} a {type(leaf).__name__}, whose tensors are not seen: pass tensors, numbers, and lists, "
                "tuples or dicts of them, or register the class with torch's pytrees."
            )


def run_once(model: nn.Module, units: Sequence[str], example: tuple[Any, ...]) -> Run:
    """Raises CannotSplitError where the forward looks at the values of tensors, or fails."""
    fake = importlib.import_module("torch._subclasses.fake_tensor").FakeTensorMode(allow_non_fake_inputs=True)
    named = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    device = next((leaf.device for leaf in pytree.tree_leaves(example) if torch.is_tensor(leaf)), None)
    for name, tensor in (*named.items(), *model.named_buffers()):
        with fake:  # what is on the meta device will be where the example is
            state[name] = torch.empty_like(tensor, device=device if tensor.is_meta else None, requires_grad=False)
    inputs: dict[str, Tensor] = {}
    leaves, structure = pytree.tree_flatten(example)
    for number, leaf in enumerate(leaves):
        if torch.is_tensor(leaf):
            inputs[f"input {number}"] = leaf
            leaves[number] = fake.from_tensor(leaf.detach())
            leaves[number]._reads = frozenset([f"input {number}"])
    outside = {name: tensor for name, tensor in state.items() if not any(name.startswith(f"{u}.") for u in units)}
    for name in outside.keys() & named.keys():
        outside[name]._reads = frozenset([name])  # type: ignore[attr-defined]
    calls: list[Call] = []
    dependencies = _Dependencies({name: tensor for name, tensor in outside.items() if name not in named})
    name = type(model).__name__
    try:
        with torch.no_grad(), _noted(model, units, calls, dependencies), fake, dependencies:
            output = torch.func.functional_call(
                model, state, pytree.tree_unflatten(leaves, structure), tie_weights=False
            )
            _check_plain(output, f"{name} returns")
    except CannotSplitError as error:
        raise CannotSplitError(f"{name} cannot be split: {error}") from None
    except Exception as error:
        hint = ""
        if "DataDependent" in type(error).__name__ or "Dynamic" in type(error).__name__:
            hint = "it looks at the values of tensors, by which another batch may take another way; "
        text = str(error).strip().splitlines() or [""]
        raise CannotSplitError(
            f"{name} cannot be split: run on fake tensors, {hint}it fails with {type(error).__name__}: {text[0]}"
        ) from error
    return Run(calls, inputs, dependencies.of(output))


@contextmanager
def _noted(model: nn.Module, units: Sequence[str], calls: list[Call], dependencies: _Dependencies) -> Iterator[None]:
    names = set(units)
    begun: list[tuple[frozenset[str], float]] = []

    def before(name: str, module: nn.Module, arguments: Any, options: Any) -> None:
        _check_plain((arguments, options), f"{name} is called with")
        begun.append((dependencies.of((arguments, options)), dependencies.flops))

    def behind(name: str, module: nn.Module, arguments: Any, output: Any) -> None:
        reads, flops = begun.pop()
        if begun:
            return  # within another unit
        _check_plain(output, f"{name} returns")
        number = sum(call.unit == name for call in calls)
        outputs: dict[str, int] = {}
        leaves = pytree.tree_leaves(output)
        for place, leaf in enumerate(leaves):
            if torch.is_tensor(leaf):
                key = name + (f" (call {number + 1})" if number else "") + (f"[{place}]" if len(leaves) > 1 else "")
                outputs[key] = place
                dependencies.returned(leaf, key)
        calls.append(Call(name, reads, outputs, output, dependencies.flops - flops))

    handles = []
    for name in names:
        module = model.get_submodule(name)
        handles.append(module.register_forward_pre_hook(partial(before, name), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(behind, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
