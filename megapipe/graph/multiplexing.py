"""A forward of one stage and a backward of another as one graph, in which each computes while the other communicates.

The operators of each keep their order. The backward goes first; whenever one of the two would wait for a communication
that it has begun, the other goes on until it would wait too. On an accelerator the order is enough: a communication
runs on a stream of its own, and a wait holds the stream of the computation and not the host. Where the host waits for
sizes, the device has the other's operators meanwhile.
"""

from __future__ import annotations

from torch.fx import Graph, GraphModule, Node

from ..overlap import wait_in_window
from .nodes import Boxed, is_read, is_start, is_wait
from .size_reads import finish_in_window

PART = "megapipe_part"
"""The key in a node's `meta` for its graph: "forward" or "backward"."""


def communicates(graph: GraphModule) -> bool:
    return any(is_start(node) for node in graph.graph.nodes)


def with_windows(graph: GraphModule) -> GraphModule:
    """A graph whose waits are overlap windows."""
    if not communicates(graph):
        return graph
    copied = Graph()
    copied.set_codegen(Boxed())
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        if is_wait(node):
            node.target = finish_in_window if is_read(node) else wait_in_window
    return GraphModule(graph, copied)


def multiplex(forward: GraphModule, backward: GraphModule) -> GraphModule:
    """One graph out of two that have nothing to do with each other.

    [*inputs of forward, *inputs of backward] -> (*outputs of forward, *outputs of backward). Each node is annotated
    with the part that it is from, in `meta[PART]`.
    """
    graph = Graph()
    graph.set_codegen(Boxed())
    parts = {"forward": forward, "backward": backward}
    of: dict[str, dict[Node, Node]] = {"forward": {}, "backward": {}}
    for name, part in parts.items():
        for node in part.graph.find_nodes(op="placeholder"):
            of[name][node] = graph.placeholder(f"{name}_{node.name}")
            of[name][node].meta = {**node.meta, PART: name}
    left = {name: _sink_waits(part) for name, part in parts.items()}
    current, other = ("backward", "forward") if communicates(backward) else ("forward", "backward")
    waits_for: dict[str, Node | None] = {"forward": None, "backward": None}
    while left[current] or left[other]:
        if not left[current]:
            current, other = other, current
        node = left[current][0]
        if is_wait(node) and waits_for[current] is not node and left[other]:
            waits_for[current] = node  # the next time it is its turn, it does wait
            current, other = other, current
            continue
        left[current].pop(0)
        copied = graph.node_copy(node, lambda source, current=current: of[current][source])  # type: ignore[misc]
        copied.meta = {**node.meta, PART: current}
        of[current][node] = copied
    outputs = []
    for name, part in parts.items():
        (end,) = part.graph.find_nodes(op="output")
        outputs += [None if node is None else of[name][node] for node in end.args[0]]
    graph.output(tuple(outputs))
    constants = {
        str(node.target): getattr(part, str(node.target))
        for part in parts.values()
        for node in part.graph.find_nodes(op="get_attr")
    }
    return GraphModule(constants, graph)


def _sink_waits(part: GraphModule) -> list[Node]:
    """The nodes of a graph in its order, except that each wait sinks to the first node that needs it."""
    order: list[Node] = []
    waits: set[Node] = set()

    def settle(node: Node) -> None:
        for source in node.all_input_nodes:
            if source in waits:
                waits.discard(source)
                order.append(source)

    for node in part.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        if is_wait(node):
            waits.add(node)
        else:
            settle(node)
            order.append(node)
    return [*order, *(node for node in part.graph.nodes if node in waits)]
