"""The graphs of a stage at work: one autograd Function.

In a backward that a schedule has split, it computes the input gradients, and defers the weight gradients as a layer of
`weight_grad` does. So the verbs know nothing of graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.fx import GraphModule

from ..activations import as_it_is, saving
from ..chunks import as_sharded
from ..overlap import fill_window
from ..weight_grad import (
    SavedTensor,
    add_weight_gradient,
    autocast_dtype,
    backward_context,
    defer,
    deferring_to,
    once_differentiable,
    save_for_w,
)
from .backward_split import SplitBackward, WeightGradient, split_di_dw
from .captured_arguments import TensorTree, laid_out
from .compile import compile_graph
from .module_state import SharedOut
from .multiplexing import communicates, multiplex, with_windows
from .nodes import storage_of
from .partitioning import Partition

Runner = Callable[[list[Tensor]], tuple[Any, ...]]


class Graphs:
    """The graphs of a stage in one mode, ready to run.

    Args:
        compiled_as: names the stage where its graphs are to be compiled; None where not.
    """

    def __init__(
        self, partition: Partition, num_weights: int, output: TensorTree, shared_out: SharedOut, compiled_as: str | None
    ) -> None:
        self.partition = partition
        self.shared_out = shared_out
        self.output = output
        self.num_weights = num_weights
        self._compiled_as = compiled_as
        placeholders = partition.backward.graph.find_nodes(op="placeholder")
        self.first_tangent = len(placeholders) - len(partition.differentiable)
        self.tangent_strides = [node.meta["val"].stride() for node in placeholders[self.first_tangent :]]
        self.may_alias = _find_aliases(partition, self.first_tangent - len(partition.read))
        self.communicates = communicates(partition.forward) or communicates(partition.backward)
        self._runners: dict[GraphModule, Runner] = {}
        self._multiplexed: dict[tuple[GraphModule, GraphModule], GraphModule] = {}

    @cached_property
    def split(self) -> SplitBackward:
        return split_di_dw(self.partition.backward, range(self.num_weights))

    def run(self, graph: GraphModule, name: str, arguments: list[Tensor], has_windows: bool = True) -> tuple[Any, ...]:
        """One of the graphs. Empties `arguments`.

        Args:
            has_windows: its waits are overlap windows. Those of compiled graphs never are.
        """
        if graph not in self._runners:
            if self._compiled_as is not None:
                self._runners[graph] = compile_graph(graph, f"{name} of {self._compiled_as}")
            else:
                self._runners[graph] = (with_windows(graph) if has_windows else graph).forward
        with _as_captured(arguments):
            return self._runners[graph](arguments)

    def run_with(
        self, forward: OfferedForward | None, graph: GraphModule, name: str, arguments: list[Tensor]
    ) -> tuple[Any, ...]:
        """One of the backward graphs, and in its overlap windows the forward of another stage, if there is one."""
        if forward is None:
            return self.run(graph, name, arguments)
        other = forward.graphs.partition
        key = other.forward, graph
        if key not in self._multiplexed:
            self._multiplexed[key] = multiplex(other.forward, graph)
        both = [*forward.graphs.shared_out.parts(forward.inputs), *arguments]
        arguments.clear()
        results = self.run(self._multiplexed[key], f"{name} and a forward", both, has_windows=False)
        num_results = other.num_outputs + len(other.mutated) + len(forward.graphs.may_alias)
        forward.results = results[:num_results]
        return results[num_results:]


class OfferedForward:
    """A forward that the next backward of a captured stage may run in its own graph, multiplexed."""

    def __init__(self, graphs: Graphs, inputs: list[Tensor]) -> None:
        self.graphs, self.inputs = graphs, inputs
        self.results: tuple[Tensor, ...] | None = None


@contextmanager
def offering(forward: OfferedForward) -> Iterator[None]:
    """Let a backward of a captured stage, run meanwhile, multiplex it with its own graph."""
    backward_context.offered_forward = forward
    try:
        yield
    finally:
        if backward_context.offered_forward is forward:
            backward_context.offered_forward = None


def _take_offered(graphs: Graphs) -> OfferedForward | None:
    """Fill the overlap window: if a captured stage's forward begins there, it offers itself."""
    if graphs.communicates:
        fill_window()
    forward: OfferedForward | None = backward_context.offered_forward
    backward_context.offered_forward = None
    return forward


def _find_aliases(parts: Partition, num_saved: int) -> list[bool]:
    """Whether each saved value shares memory with an input or an output, so that others may change it."""
    (end,) = parts.forward.graph.find_nodes(op="output")
    values: Any = end.args[0]
    others = {storage_of(node) for node in values[: parts.num_outputs]}
    others.update(parts.forward.graph.find_nodes(op="placeholder"))
    return [storage_of(node) in others for node in values[len(values) - num_saved :]]


def run_forward(graphs: Graphs, inputs: list[Tensor], results: tuple[Tensor, ...] | None = None) -> Any:
    """Returns the output of the stage.

    Args:
        results: of its forward graph, if that was run already.
    """
    if torch.is_grad_enabled():
        outputs = _Run.apply(graphs, results, *inputs)  # type: ignore[no-untyped-call]
    else:
        parts = graphs.partition
        inputs = graphs.shared_out.parts(inputs)
        values = results or graphs.run(parts.forward_only, "the forward without gradients", list(inputs))
        outputs = values[: parts.num_outputs]
        _overwrite(inputs, parts.mutated, values[parts.num_outputs :])
    return graphs.output.fill(outputs)


def _as_captured(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """The casts of autocast are in the graph already."""
    device = next((tensor.device.type for tensor in tensors if isinstance(tensor, Tensor)), None)  # others are sizes
    if device is None or autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _overwrite(inputs: Sequence[Tensor], numbers: Sequence[int], values: Sequence[Tensor]) -> None:
    for number, value in zip(numbers, values):
        inputs[number].copy_(value)


class _Run(Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, results: Sequence[Tensor] | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        parts = graphs.partition
        ctx.graphs, ctx.weights = graphs, inputs[: graphs.num_weights]
        taken = graphs.shared_out.parts(inputs)
        if results is None:
            results = graphs.run(parts.forward, "the forward", list(taken))
        first_saved = parts.num_outputs + len(parts.mutated)
        # Detached: autograd refuses to change a view made in here in place.
        outputs = [value.detach() for value in results[: parts.num_outputs]]
        saved = results[first_saved:]
        _overwrite(taken, parts.mutated, results[parts.num_outputs : first_saved])
        # Autograd checks that aliases are not changed. The others cannot be; they are freed as backward runs.
        aliases = [value for value, may_alias in zip(saved, graphs.may_alias) if may_alias]
        ctx.save_for_backward(*(taken[n] for n in parts.read), *aliases)
        ctx.saver = saving()
        keep = as_it_is if ctx.saver is None else ctx.saver.pack
        ctx.saved = [
            None if may_alias else keep(value) if isinstance(value, Tensor) else _Size(value)
            for value, may_alias in zip(saved, graphs.may_alias)
        ]
        ctx.mark_non_differentiable(*(out for n, out in enumerate(outputs) if n not in parts.differentiable))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        graphs: Graphs = ctx.graphs
        forward = _take_offered(graphs)
        arguments = _arguments_of_backward(ctx, output_grads)
        del output_grads
        if deferring_to() is not None:
            return None, None, *_deferred(graphs, ctx.weights, forward, arguments)
        grads = graphs.run_with(forward, graphs.partition.backward, "the backward", arguments)
        return None, None, *graphs.shared_out.gradients(grads)


def _arguments_of_backward(ctx: Any, output_grads: Sequence[Tensor]) -> list[Tensor]:
    graphs: Graphs = ctx.graphs
    if ctx.saved is None:
        raise RuntimeError(
            "the backward of a captured stage was run a second time, but what it needs was freed in the first: run the "
            "forward again."
        )
    again = ctx.saved_tensors
    num_read = len(graphs.partition.read)
    aliases = iter(again[num_read:])
    fetch = as_it_is if ctx.saver is None else ctx.saver.unpack
    saved = [
        next(aliases) if value is None else value.get() if isinstance(value, _Size) else fetch(value)
        for value in ctx.saved
    ]
    ctx.saved = None
    grads = [output_grads[n] for n in graphs.partition.differentiable]
    return [*again[:num_read], *saved, *(laid_out(grad, s) for grad, s in zip(grads, graphs.tangent_strides))]


def _deferred(
    graphs: Graphs, weights: Sequence[Tensor], forward: OfferedForward | None, arguments: list[Tensor]
) -> list[Tensor | None]:
    """B. Hands the weight gradients to `defer`, one at a time."""
    split = graphs.split
    kept = {n: _kept(arguments[n], save_for_w if n >= graphs.first_tangent else SavedTensor) for n in split.kept_inputs}
    first_kept = len(arguments)
    results = graphs.run_with(forward, split.input_gradients, "the input gradients", arguments)
    grads = graphs.shared_out.gradients(results[: split.num_outputs])
    kept.update((n, _kept(value, save_for_w)) for n, value in enumerate(results[split.num_outputs :], first_kept))
    for weight_gradient in split.weights:
        weight = weights[weight_gradient.output]
        takes = [kept[n] for n in weight_gradient.takes]
        of_weight = graphs, weight_gradient, takes
        if weight._backward_hooks:  # these see a gradient before it is added
            grads[weight_gradient.output] = _weight_gradient(*of_weight)
        else:
            defer(weight, partial(_weight_gradient, *of_weight), partial(_add_weight_gradient, *of_weight))
    return grads


class _Size:
    """A size that depends on values, kept where tensors are."""

    def __init__(self, size: int) -> None:
        self._size = size

    def get(self) -> int:
        return self._size


def _kept(value: Tensor | int, save: Callable[[Tensor], SavedTensor]) -> SavedTensor | _Size:
    return save(value) if isinstance(value, Tensor) else _Size(value)


def _weight_gradient(graphs: Graphs, weight: WeightGradient, saved: list[SavedTensor | _Size]) -> Tensor:
    arguments: list[Any] = [one.get() for one in saved]
    (gradient,) = graphs.run(weight.graph, "a weight gradient", arguments)
    return graphs.shared_out.gradient(weight.output, gradient)  # type: ignore[no-any-return]


def _add_weight_gradient(
    graphs: Graphs, weight: WeightGradient, saved: list[SavedTensor | _Size], target: Tensor
) -> None:
    if weight.operands is None or as_sharded(target) is not None:
        target.add_(_weight_gradient(graphs, weight, saved))
        return
    left, right = weight.operands.forward([one.get() for one in saved])
    add_weight_gradient(target, right, left.t())
