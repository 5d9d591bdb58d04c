"""Sizes that depend on values: whole numbers that a stage reads from tensors, such as how many tokens an expert has.

In a trace they are symbols, in a graph at work they are integers. The one file that knows torch's symbols.
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .errors import CaptureError, this_line


class SizesRead:
    """The symbols of one trace, and the lines that have read them.

    Args:
        what: names the stage in errors.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._mode = _new_mode()
        self._shapes = self._mode.shape_env
        self._lines: dict[Any, str] = {}
        self._shapes.create_unbacked_symint = partial(self._note, self._shapes.create_unbacked_symint)
        self._shapes.create_unbacked_symfloat = partial(self._refuse, "a number with a fraction")
        self._shapes.create_unbacked_symbool = partial(self._refuse, "whether something is so")

    def without_values(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The inputs of the trace."""
        return tuple(self._mode.from_tensor(tensor, static_shapes=True) for tensor in tensors)

    def line_of(self, value: Any) -> str | None:
        """The line that a tensor has its size from; None where values have no part in it."""
        numbers = _layout(value) if isinstance(value, Tensor) else ()
        symbols = sorted({symbol for number in numbers for symbol in _symbols(number)}, key=str)
        return self._lines.get(symbols[0], "an unknown line") if symbols else None

    def insert_checks(self, owner: GraphModule) -> None:
        """Let the graph check what its program has said of sizes (`torch._check`) and what torch has concluded. And let
        a node give each size that only the shape of a tensor has, as that of `x[mask]`."""
        asserts: Any = importlib.import_module("torch.fx.passes.runtime_assert")
        asserts.insert_deferred_runtime_asserts(owner, self._shapes, "a stage", export=True)

    def _note(self, create: Callable[..., Any], *args: Any, **options: Any) -> Any:
        made = create(*args, **options)
        for symbol in _symbols(made):
            self._lines[symbol] = this_line()
        return made

    def _refuse(self, read: str, *_: Any, **__: Any) -> Any:
        raise CaptureError(
            f"{self._what} cannot be captured: at {this_line()} it reads {read} from a tensor, and a graph is the same "
            "for all values: keep that in a tensor (without .item(), torch.where instead of an if), or leave this "
            "stage eager."
        )


def is_symbolic(value: Any) -> bool:
    """Whether it is a tensor whose layout depends on values, or a whole number that does."""
    if isinstance(value, Tensor):
        return any(isinstance(number, torch.SymInt) for number in _layout(value))
    return isinstance(value, torch.SymInt)


def is_size(node: Node) -> bool:
    """Whether it gives a whole number that depends on values."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def is_check(node: Node) -> bool:
    """Whether it only raises an error where a fact about sizes is not true."""
    return node.target is torch.ops.aten._assert_scalar.default


def sizes_in(owner: GraphModule, values: Iterable[Node]) -> list[Node]:
    """The nodes that give the symbols in the layouts of `values`: compiled code must be told what they stand for. Where
    there is none, as in a graph cut out of another, one is inserted."""
    tensors = [value for value in values if isinstance(value.meta.get("val"), Tensor)]
    symbols = {symbol for node in tensors for number in _layout(node.meta["val"]) for symbol in _symbols(number)}
    found: dict[Any, Node] = {}
    for node in owner.graph.nodes if symbols else ():
        if is_size(node) and (symbol := node.meta["val"].node.expr) in symbols:
            found.setdefault(symbol, node)
    for node in tensors:
        for dim, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt) and (symbol := size.node.expr) in symbols - found.keys():
                with owner.graph.inserting_after(node):
                    found[symbol] = owner.graph.call_function(torch.ops.aten.sym_size.int, (node, dim))
                found[symbol].meta = {"val": size}
    assert len(found) == len(symbols), f"nothing gives {symbols - found.keys()}"
    return list(found.values())


class OneMode:
    """Values of any traces, made anew for one: graphs of several traces can then be compiled as one.

    Each trace has a mode of its own and numbers its symbols from 0. And the forward and the backward of one trace have
    the same symbols, although in one graph they belong to two microbatches: so each part gets symbols of its own.
    """

    def __init__(self) -> None:
        self._mode = _new_mode()
        self._shapes = self._mode.shape_env
        self._new: dict[Hashable, dict[Any, Any]] = {}
        self._sources: dict[Hashable, Any] = {}

    def move(self, part: Hashable, value: Any) -> Any:
        """A value of the graph `part`: a tensor of a trace, or a size."""
        if not isinstance(value, Tensor):
            return self._size(part, value)
        shape, stride = ([self._size(part, size) for size in sizes] for sizes in (value.shape, value.stride()))
        for size in shape:
            _check(size >= 0)
        with self._mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    def check_facts(self) -> list[str]:
        """Take over what the traces know of their symbols. Call it when all values have been moved. Returns the
        facts."""
        told = []
        for part, source in self._sources.items():
            new = self._new[part]
            asserted = [one.expr for some in source.deferred_runtime_asserts.values() for one in some]
            for fact in dict.fromkeys(asserted):
                if fact.free_symbols and fact.free_symbols <= new.keys():
                    moved = fact.xreplace(new)
                    _check(self._shapes.create_symboolnode(moved))
                    told.append(str(moved))
        return told

    def _size(self, part: Hashable, size: Any) -> Any:
        symbols = _symbols(size)
        if not symbols:
            return int(size)
        new = self._new.setdefault(part, {})
        source = self._sources[part] = size.node.shape_env
        for old in sorted(symbols - new.keys(), key=str):
            with self._shapes.ignore_fresh_unbacked_symbols():
                made = self._shapes.create_unbacked_symint()
            known = source.var_to_range[old]
            for bound, is_true in ((known.lower, operator.ge), (known.upper, operator.le)):
                if abs(bound) < sys.maxsize:  # not infinite
                    _check(is_true(made, int(bound)))
            new[old] = made.node.expr
        return self._shapes.create_symintnode(size.node.expr.xreplace(new), hint=None)


_check: Any = torch._check  # which has no types


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return *tensor.shape, *tensor.stride(), tensor.storage_offset()


def _symbols(number: Any) -> set[Any]:
    return set(number.node.expr.free_symbols) if isinstance(number, torch.SymInt) else set()


def _new_mode() -> Any:
    fake: Any = importlib.import_module("torch._subclasses.fake_tensor")
    shapes: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    return fake.FakeTensorMode(shape_env=shapes.ShapeEnv())
