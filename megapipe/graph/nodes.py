"""Properties of nodes, and graphs cut out of graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils.flop_counter import flop_registry

from .symbolic_sizes import is_symbolic

_aten = torch.ops.aten
# Besides matrix products, convolutions and attention: gradients of tables, as large as the table.
_COMPUTE_BOUND = {
    _aten.embedding_dense_backward,
    _aten.index_put,
    _aten._unsafe_index_put,
    _aten.index_add,
    _aten.scatter_add,
    *filter(None, [getattr(_aten, "_grouped_mm", None)]),
}
_OWN = ("megapipe.grouped_linear", "megapipe.grouped_gradient")
"""Operators of `weight_grad`."""


def is_view(node: Node) -> bool:
    """Whether it costs nothing: it only looks at its input's memory in another way."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, Node) and is_view(source)
    if not isinstance(node.target, OpOverload) or not node.all_input_nodes:  # as the conjugate of a number
        return False
    returns = node.target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def is_compute_bound(node: Node) -> bool:
    """Whether it is a matrix product or the like, whose time is worth moving."""
    if not isinstance(node.target, OpOverload):
        return False
    packet = node.target.overloadpacket
    return packet in flop_registry or packet in _COMPUTE_BOUND or str(packet) in _OWN


def is_random(node: Node) -> bool:
    """Whether it draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags


def drop_idle_views(owner: GraphModule) -> None:
    """Where a view of a view looks at the memory as one before it does, take that: the transpose of a transpose."""
    for node in owner.graph.nodes:
        before = node
        while is_view(before) and (before := before.all_input_nodes[0]):
            if _look_alike(node.meta.get("val"), before.meta.get("val")):
                node.replace_all_uses_with(before)
                break


def _look_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    if is_symbolic(one) or is_symbolic(other):  # by what is written, since a comparison would ask for values
        return str(_look(one)) == str(_look(other))
    return _look(one) == _look(other)


def _look(tensor: Tensor) -> tuple[Any, ...]:
    layout = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype
    return *layout, tensor.is_conj(), tensor.is_neg()


def num_bytes(node: Node) -> int:
    """The size of the tensor that it gives. One that depends on values is larger than all others."""
    value = node.meta["val"]
    if not isinstance(value, Tensor):
        return 0
    return _UNKNOWN if is_symbolic(value) else value.numel() * value.element_size()


_UNKNOWN = 1 << 60


def is_start(node: Node) -> bool:
    """Whether it begins to communicate with other ranks (torch's functional collectives), or with the host."""
    return (_is_collective(node) or is_read(node)) and not is_wait(node)


def is_wait(node: Node) -> bool:
    """Whether it waits for what `is_start` has begun, and gives the result."""
    return "wait_tensor" in str(node.target) if _is_collective(node) else str(node.target) == _READS[1]


def is_read(node: Node) -> bool:
    """Whether it is one of the halves in which the host reads from an accelerator."""
    return str(node.target) in _READS


_READS = ("megapipe.start_read.default", "megapipe.finish_read.default")
"""Operators of `size_reads.py`."""


def _is_collective(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and "c10d_functional" in node.target.namespace


def storage_of(node: Node) -> Node:
    """The node whose memory this one looks at: itself if it is no view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def ancestors(nodes: Iterable[Node | None], stop: Collection[Node] = ()) -> set[Node]:
    """All that `nodes` are computed from, themselves included, up to and with those in `stop`."""
    found = {node for node in nodes if node is not None}
    open_nodes = list(found)
    while open_nodes:
        node = open_nodes.pop()
        if node in stop:
            continue
        for source in node.all_input_nodes:
            if source not in found:
                found.add(source)
                open_nodes.append(source)
    return found


def dependents(owner: GraphModule, nodes: Iterable[Node]) -> set[Node]:
    """All that is computed from any of `nodes`, themselves included."""
    found = set(nodes)
    for node in owner.graph.nodes:
        if any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


class Boxed(CodeGen):
    """Takes its arguments in a list and clears it, so that each is freed after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name != "self"]
        lines = [f"def {self._func_name}(self, arguments){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = arguments")
        lines.append("    arguments.clear()")
        return "\n".join(lines)


def extract(
    owner: GraphModule,
    inputs: Sequence[Node],
    outputs: Sequence[Node | None],
    sink: Callable[[Node], bool] = lambda node: False,
    besides: Collection[Node] = (),
) -> GraphModule:
    """The part of a graph that computes `outputs` from `inputs`, as a graph of its own.

    Its forward takes one list, of the inputs in this order, and empties it, so that they can be freed while it runs.
    It returns a tuple, with None where an output is None.

    Args:
        sink: nodes to be computed right before their first use, not at their place in `owner`.
        besides: nodes to be computed, too, for what they do besides their values.
    """
    graph = Graph()
    graph.set_codegen(Boxed())
    of: dict[Node, Node] = {}
    for node in inputs:
        assert node not in of, f"{node} is given twice"
        of[node] = graph.placeholder(node.name)
        of[node].meta = dict(node.meta)
    needed = ancestors([*outputs, *besides], set(inputs))

    def emit(node: Node) -> None:
        open_nodes = [node]
        while open_nodes:
            missing = [source for source in open_nodes[-1].all_input_nodes if source not in of]
            if missing:
                open_nodes.extend(reversed(missing))
            else:
                done = open_nodes.pop()
                if done not in of:
                    assert done.op != "placeholder", f"{done} is not among the inputs"
                    of[done] = graph.node_copy(done, lambda source: of[source])

    for node in owner.graph.nodes:
        if node in needed and node not in of and not sink(node):
            emit(node)
    for output in outputs:
        if output is not None and output not in of:
            emit(output)
    graph.output(tuple(None if output is None else of[output] for output in outputs))
    return GraphModule(owner, graph)
