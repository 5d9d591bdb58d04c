"""Activation checkpointing by choosing the cut between forward and backward.

A forward is narrow in some places: between the layers of a transformer, and between attention and MLP, nothing is alive
but the residual stream. It is saved there; everything between is computed again when backward gets there. Nothing is
drawn or sent twice: random numbers, and tensors that arrived from other ranks, are saved too if backward needs them.
"""

from __future__ import annotations

from operator import getitem

from torch import Tensor
from torch.fx import Node

from .joint import Joint
from .nodes import is_compute_bound, is_random, is_wait, num_bytes, storage_of
from .partitioning import Partition, forward_nodes, partition

__all__ = ["recompute"]


def recompute(joint: Joint, num_weights: int = 0) -> Partition:
    """Cut a joint graph where its forward is narrowest. Values that W needs are kept from B to W as usual.

    Args:
        num_weights: see `partition`.
    """
    of_forward = forward_nodes(joint)
    in_forward = [node for node in joint.owner.graph.nodes if node in of_forward]
    saved = {node for cut in _narrowest_cuts(joint, in_forward) for node in cut}
    for node in in_forward:
        source = node.args[0] if node.target is getitem else node
        if isinstance(source, Node) and (is_random(source) or is_wait(source)):
            saved.add(node)
    return partition(joint, num_weights, saved)


def _narrowest_cuts(joint: Joint, in_forward: list[Node]) -> list[set[Node]]:
    """The values alive at each of the narrowest places between two compute-bound operators."""
    inputs = set(joint.inputs)
    last_use: dict[Node, int] = {}
    for place, node in enumerate(in_forward):
        for source in node.all_input_nodes:
            last_use[storage_of(source)] = place
    for output in (*joint.outputs, *joint.mutated.values()):
        last_use[storage_of(output)] = len(in_forward)
    bounds = [place for place, node in enumerate(in_forward) if is_compute_bound(node)]
    alive: set[Node] = set()
    places: list[tuple[int, set[Node]]] = []
    for place, node in enumerate(in_forward):
        if node not in inputs and storage_of(node) is node and last_use.get(node, place) > place:
            alive.add(node)
        alive = {value for value in alive if last_use[value] > place}
        is_whole = all(isinstance(value.meta.get("val"), Tensor) for value in alive)  # no node with several results
        if is_whole and bounds and bounds[0] < place < bounds[-1]:
            places.append((sum(num_bytes(value) for value in alive), set(alive)))
    narrowest = min((width for width, _ in places if width), default=0)
    # Of those next to each other the last: a residual stream before it is added to is as narrow as after.
    return [
        values
        for (width, values), (next_width, _) in zip(places, [*places[1:], (0, None)])
        if width == narrowest != next_width
    ]
