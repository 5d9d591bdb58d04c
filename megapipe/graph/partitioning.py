"""A joint graph cut into forward and backward; where the cut is chosen well, it is activation checkpointing.

A forward is narrow in some places: between the layers of a transformer, and between attention and MLP, nothing is alive
but the residual stream. `recompute` saves that; backward computes everything between again when it gets there. Nothing
is drawn, sent or chosen twice: random numbers, tensors that arrived from other ranks, sizes that depend on values, and
the choices that these sizes come from, are saved too if backward needs them.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .joint_graph import Joint
from .nodes import (
    ancestors,
    dependents,
    extract,
    is_compute_bound,
    is_random,
    is_start,
    is_view,
    is_wait,
    num_bytes,
    storage_of,
)
from .symbolic_sizes import is_check, is_size, sizes_in


@dataclass(frozen=True)
class Partition:
    """Who keeps what: the caller keeps, from forward to backward, the inputs in `read` and what forward says to save.

    Every graph takes one list, which it empties, and returns a tuple (see `extract`).
    """

    forward: GraphModule
    """[*inputs] -> (*outputs, *new values of the inputs in `mutated`, *saved)."""
    backward: GraphModule
    """[*inputs in `read`, *saved, *gradients of the outputs in `differentiable`] -> one gradient per input, None where
    it has none."""
    forward_only: GraphModule
    """[*inputs] -> (*outputs, *new values of the inputs in `mutated`)."""
    num_outputs: int
    mutated: tuple[int, ...]
    """Inputs, by number, that the caller is to overwrite."""
    read: tuple[int, ...]
    """Inputs, by number, that backward wants to see again."""
    differentiable: tuple[int, ...]
    """Outputs, by number, that have a gradient."""


def partition(joint: Joint, num_weights: int = 0, saved: Collection[Node] | None = None) -> Partition:
    """Cut a joint graph in two.

    Args:
        num_weights: so many of the first inputs are there anyway, and the same for all microbatches. What is cheap to
            compute from them alone, such as their casts under autocast, backward computes again.
        saved: the values of the forward that backward may have; it computes the rest again. None: all that it wants, as
            eager, except that views are always taken again.
    """
    owner = joint.owner
    dropouts = [] if saved is None else _dropouts_from_masks(owner)
    read, wanted = _boundary(joint, _forward_nodes(joint) - _made_of_weights(joint, num_weights), saved)
    overwritten = [joint.inputs[n] for n in joint.mutated if joint.inputs[n] in read]
    if overwritten:
        for dropped, again in dropouts:
            again.replace_all_uses_with(dropped)
        for node in overwritten:
            _save_before_overwritten(owner, node)
        return partition(joint, num_weights, None if saved is None else [*saved, *(node.next for node in overwritten)])
    held = Counter(storage_of(grad) for grad in set(joint.grads) if grad is not None)
    shared = {storage for storage, count in held.items() if count > 1}  # autograd adds up in place what it is given
    grads = [_cloned_if_kept(owner, grad, {*read, *wanted, *shared}) for grad in joint.grads]
    differentiable = [n for n, tangent in enumerate(joint.tangents) if tangent is not None]
    tangents = [tangent for tangent in joint.tangents if tangent is not None]
    done = [*joint.outputs, *joint.mutated.values()]
    after_tangents = dependents(owner, tangents)
    # Numbers that nothing reads, and what is known of sizes.
    idle = [node for node in owner.graph.nodes if is_check(node) or (is_random(node) and not node.users)]
    besides = [node for node in idle if node not in after_tangents]
    backward = extract(owner, [*read, *wanted, *tangents], grads, lambda node: node not in after_tangents)
    for dropped, again in dropouts:
        again.replace_all_uses_with(dropped)
    return Partition(
        forward=extract(owner, joint.inputs, [*done, *wanted], besides=besides),
        backward=backward,
        forward_only=extract(owner, joint.inputs, done, besides=besides),
        num_outputs=len(joint.outputs),
        mutated=tuple(joint.mutated),
        read=tuple(joint.inputs.index(node) for node in read),
        differentiable=tuple(differentiable),
    )


def _forward_nodes(joint: Joint) -> set[Node]:
    """The nodes of the function itself."""
    found = ancestors([*joint.outputs, *joint.mutated.values()])
    return found | {node for source in found for node in source.users if node.target is operator.getitem}


def _made_of_weights(joint: Joint, num_weights: int) -> set[Node]:
    weights = set(joint.inputs[:num_weights])
    made: set[Node] = set()
    for node in joint.owner.graph.nodes:
        sources = node.all_input_nodes
        is_dear = is_compute_bound(node) or is_random(node) or is_start(node)
        if node.op == "call_function" and sources and not is_dear:
            made.update({node} if all(source in weights or source in made for source in sources) else ())
    return made


def _boundary(joint: Joint, in_forward: set[Node], saved: Collection[Node] | None) -> tuple[list[Node], list[Node]]:
    """The inputs that backward reads and the values that it wants saved, in the graph's order."""
    inputs = set(joint.inputs)
    seen: set[Node] = set()
    wanted: set[Node] = set()
    open_nodes = [grad for grad in joint.grads if grad is not None]
    while open_nodes:
        node = open_nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in inputs:
            wanted.add(node)
            continue
        is_value = node in in_forward and node.op != "get_attr" and not is_view(node)
        if is_value and (saved is None or node in saved):
            wanted.add(node)
            continue
        open_nodes.extend(node.all_input_nodes)
    wanted.update(sizes_in(joint.owner, wanted))
    in_order = [node for node in joint.owner.graph.nodes if node in wanted]
    return [node for node in in_order if node in inputs], [node for node in in_order if node not in inputs]


def _save_before_overwritten(owner: GraphModule, node: Node) -> None:
    """Let backward see what an input was before the forward changed it."""
    with owner.graph.inserting_after(node):
        copy = owner.graph.call_function(torch.ops.aten.clone.default, (node,))
    copy.meta = dict(node.meta)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _dropouts_from_masks(owner: GraphModule) -> list[tuple[Node, Node]]:
    """Compute dropouts from their masks, which are random, so that their results need not be saved beside them.
    Returns pairs of the result and the node that takes its place."""
    replaced = []
    aten = torch.ops.aten
    for node in owner.graph.find_nodes(op="call_function", target=aten.native_dropout.default):
        results = {use.args[1]: use for use in node.users}
        x, p, train = node.args
        if len(results) == 2 and train is not False:
            with owner.graph.inserting_after(results[1]):
                kept = owner.graph.call_function(aten.mul.Tensor, (x, results[1]))
            with owner.graph.inserting_after(kept):
                again = owner.graph.call_function(aten.mul.Tensor, (kept, 1 / (1 - p) if p < 1 else 0.0))
            kept.meta = again.meta = dict(results[0].meta)
            results[0].replace_all_uses_with(again)
            replaced.append((results[0], again))
    return replaced


def _cloned_if_kept(owner: GraphModule, grad: Node | None, kept: Collection[Node]) -> Node | None:
    """A gradient, copied where it is memory that is kept for W: it may become a `.grad`, which is added to in place."""
    if grad is None or storage_of(grad) not in kept:
        return grad
    with owner.graph.inserting_after(grad):
        copy = owner.graph.call_function(torch.ops.aten.clone.default, (grad,))
    copy.meta = dict(grad.meta)
    return copy


def recompute(joint: Joint, num_weights: int = 0) -> Partition:
    """Cut a joint graph where its forward is narrowest. Values that W needs are kept from B to W as usual.

    Args:
        num_weights: see `partition`.
    """
    of_forward = _forward_nodes(joint)
    in_forward = [node for node in joint.owner.graph.nodes if node in of_forward]
    saved = {node for cut in _narrowest_cuts(joint, in_forward) for node in cut}
    for node in in_forward:
        source = node.args[0] if node.target is operator.getitem else node
        if isinstance(source, Node) and (is_random(source) or is_wait(source) or is_size(node)):
            saved.add(node)
    # A buffer may have changed since, and another choice would not have these sizes.
    saved.update(node for node in ancestors(node for node in in_forward if is_size(node)) if _is_choice(node))
    return partition(joint, num_weights, saved)


def _is_choice(node: Node) -> bool:
    value = node.meta.get("val")
    is_computed = node.op == "call_function" and not is_view(node)
    return is_computed and isinstance(value, Tensor) and not value.is_floating_point()


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
        if is_size(node):  # which takes no room
            continue
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
