"""A backward graph cut into the input gradients, which other ranks wait for, and weight gradients, which can wait.

Each weight's gradient becomes a graph of its own, so that W can add it up and free it before it goes on to the next.
What such a graph computes leads to that gradient and to nothing else: its matrix product and what comes after. All the
rest is computed in B, where that is also what keeps memory low: the gradient of a norm's weight or of a bias is a
vector, what it is computed from is not.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .nodes import extract, is_compute_bound, is_view, storage_of
from .symbolic_sizes import is_symbolic, sizes_in


@dataclass(frozen=True)
class WeightGradient:
    """The gradient of one weight."""

    output: int
    """Which one it is among the outputs of the whole backward."""
    graph: GraphModule
    """[*values in `takes`] -> (gradient,): contiguous, in memory of its own."""
    operands: GraphModule | None
    """[*values in `takes`] -> (left, right): the gradient is their product, cast perhaps. None where it is not one of
    two matrices, and on CPU, where a product is rounded before it is added."""
    takes: tuple[int, ...]
    """The values to keep for it: by number among the backward's inputs, and counting on among those that B returns."""


@dataclass(frozen=True)
class SplitBackward:
    """B and W. The caller keeps, from B to W, the values that the weights' graphs take, and nothing else."""

    input_gradients: GraphModule
    """[*inputs of the backward] -> (*outputs of the backward, None for those left to `weights`, *kept)."""
    weights: tuple[WeightGradient, ...]
    num_outputs: int
    """How many outputs the backward has."""

    @cached_property
    def kept_inputs(self) -> set[int]:
        """The inputs of the backward that W takes, by number."""
        num_inputs = len(self.input_gradients.graph.find_nodes(op="placeholder"))
        return {n for weight in self.weights for n in weight.takes if n < num_inputs}


def split_di_dw(backward: GraphModule, weights: Sequence[int]) -> SplitBackward:
    """Cut a backward graph (`Partition.backward`).

    Args:
        weights: the outputs that may be left to W, by number. Those without a matrix product of their own are not.
    """
    (end,) = backward.graph.find_nodes(op="output")
    whole = extract(backward, backward.graph.find_nodes(op="placeholder"), end.args[0])
    _split_convolutions(whole)
    (end,) = whole.graph.find_nodes(op="output")
    inputs, outputs = whole.graph.find_nodes(op="placeholder"), list(end.args[0])
    reached = _outputs_reached(whole, outputs)
    parts: dict[int, tuple[list[Node], Node]] = {}
    for number in weights:
        if outputs[number] is not None and reached[outputs[number]] == 1 << number:
            takes = _inputs_of_weight_gradient(outputs[number], reached)
            if takes is not None:
                takes = list(dict.fromkeys([*takes, *sizes_in(whole, takes)]))
                parts[number] = (takes, _contiguous_copy(whole, outputs[number]))
    given = set(inputs)
    kept = list(dict.fromkeys(node for takes, _ in parts.values() for node in takes if node not in given))
    number_of = {node: number for number, node in enumerate([*inputs, *kept])}
    remaining = [None if number in parts else output for number, output in enumerate(outputs)]
    return SplitBackward(
        extract(whole, inputs, [*remaining, *kept]),
        tuple(
            WeightGradient(
                number,
                extract(whole, takes, [output]),
                extract(whole, takes, operands) if (operands := _operands(output)) else None,
                tuple(number_of[node] for node in takes),
            )
            for number, (takes, output) in parts.items()
        ),
        len(outputs),
    )


def _outputs_reached(owner: GraphModule, outputs: Sequence[Node | None]) -> dict[Node, int]:
    """Which outputs each node leads to, as a set of bits."""
    reached: dict[Node, int] = dict.fromkeys(owner.graph.nodes, 0)
    for number, output in enumerate(outputs):
        if output is not None:
            reached[output] |= 1 << number
    for node in reversed(owner.graph.nodes):
        for source in node.all_input_nodes:
            reached[source] |= reached[node]
    return reached


def _inputs_of_weight_gradient(output: Node, reached: dict[Node, int]) -> list[Node] | None:
    """Where to cut a weight's gradient off: at the inputs of the matrix products that no compute-bound node
    follows. None if there are none."""
    takes: dict[Node, None] = {}
    has_product = False
    open_nodes = [(output, False)]
    while open_nodes:
        node, is_operand = open_nodes.pop()
        is_own = node.op == "call_function" and reached[node] == reached[output]
        if node.target is operator.getitem:  # what is kept is a tensor, not all the results of a node
            is_own = reached[node.all_input_nodes[0]] == reached[output]
        if not is_own or (is_operand and not is_view(node)):
            takes[node] = None
            continue
        has_product |= is_compute_bound(node)
        open_nodes.extend((source, is_operand or is_compute_bound(node)) for source in node.all_input_nodes)
    return list(takes) if has_product else None


def _operands(gradient: Node) -> list[Node] | None:
    if gradient.meta["val"].is_cpu:
        return None
    product: Any = gradient.args[0] if gradient.target is torch.ops.aten._to_copy.default else gradient
    return list(product.args) if product.target is torch.ops.aten.mm.default else None


def _contiguous_copy(owner: GraphModule, output: Node) -> Node:
    """`output`, in memory of its own and contiguous, so that it can become a `.grad` as it is."""
    value = output.meta["val"]
    if storage_of(output).op == "call_function" and not is_symbolic(value) and value.is_contiguous():
        return output
    with owner.graph.inserting_after(output):
        copy = owner.graph.call_function(
            torch.ops.aten.clone.default, (output,), {"memory_format": torch.contiguous_format}
        )
    copy.meta = {**output.meta, "val": value.contiguous()}
    return copy


def _split_convolutions(owner: GraphModule) -> None:
    """A convolution's backward computes up to three gradients at once: one node for each."""
    target = torch.ops.aten.convolution_backward.default
    for node in owner.graph.find_nodes(op="call_function", target=target):
        for use in list(node.users):
            assert use.target is operator.getitem
            mask = [k == use.args[1] for k in range(3)]
            with owner.graph.inserting_before(use):
                alone = owner.graph.call_function(target, (*node.args[:-1], mask))
                own = owner.graph.call_function(operator.getitem, (alone, use.args[1]))
            alone.meta, own.meta = dict(node.meta), dict(use.meta)
            use.replace_all_uses_with(own)
            owner.graph.erase_node(use)
        owner.graph.erase_node(node)
