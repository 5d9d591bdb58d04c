"""The collectives of fully sharded parameters, taken out of a stage's graphs.

A captured stage whose parameters are shards gathers them in its forward and scatters their gradients in its backward,
for each microbatch. In a pipeline that is to happen once per step: the parameters are the same for all microbatches,
and the gradients may be added up before they are reduced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from .joint_graph import Joint
from .nodes import ancestors, extract, is_start, is_wait


@dataclass(frozen=True)
class ShardedJoint:
    """Graphs for the start of a step, for each microbatch, and for the end of the step."""

    unshard: GraphModule
    """[*shards in `sharded`] -> (*whole parameters,)."""
    joint: Joint
    """The graph with whole parameters for inputs, and their gradients, unreduced; to be cut by `partition` or
    `recompute`."""
    reduce_grad: GraphModule
    """[*gradients of the whole parameters in `reduced`] -> (*gradients of the shards,)."""
    sharded: tuple[int, ...]
    """Inputs, by number."""
    reduced: tuple[int, ...]


def split_fsdp_collectives(joint: Joint) -> ShardedJoint:
    """Take the all-gathers of inputs, and the reduce-scatters of their gradients, out of a joint graph.

    Only nodes computed from one input alone, up to the end of its all-gather, are taken out: collectives of
    activations stay where they are.

    Raises:
        ValueError: a shard is gathered twice, or used as it is as well.
    """
    gathered = {n: whole for n, node in enumerate(joint.inputs) if (whole := _gathered(joint, node)) is not None}
    reduced: dict[int, tuple[Node, Node]] = {}
    for n in gathered:
        grad = joint.grads[n]
        if grad is not None and (unreduced := _unreduced(grad)) is not None:
            reduced[n] = (unreduced, grad)
    inputs = [gathered.get(n, node) for n, node in enumerate(joint.inputs)]
    grads = [reduced[n][0] if n in reduced else grad for n, grad in enumerate(joint.grads)]
    return ShardedJoint(
        extract(joint.owner, [joint.inputs[n] for n in gathered], list(gathered.values())),
        replace(joint, inputs=inputs, grads=grads),
        extract(joint.owner, [unreduced for unreduced, _ in reduced.values()], [grad for _, grad in reduced.values()]),
        tuple(gathered),
        tuple(reduced),
    )


def _gathered(joint: Joint, shard: Node) -> Node | None:
    """The result of the all-gather of an input, if it has one."""
    alone = {shard}  # nodes computed from it and nothing else
    wholes: list[Node] = []
    leaks = False
    for node in joint.owner.graph.nodes:
        if not any(source in alone for source in node.all_input_nodes):
            continue
        if is_wait(node) and "all_gather" in str(node.all_input_nodes[0].target):
            wholes.append(node)
        elif all(source in alone for source in node.all_input_nodes) and node.op == "call_function":
            alone.add(node)
        else:
            leaks = True
    if not wholes:
        return None
    if leaks or len(wholes) > 1:
        raise ValueError(
            f"the shard {shard.name} is gathered {len(wholes)} times{' and used as it is' if leaks else ''}: gather it "
            "once, and use what that gives."
        )
    return wholes[0]


def _unreduced(grad: Node) -> Node | None:
    """The input of the reduce-scatter of a gradient, if there is one."""
    starts = [node for node in ancestors([grad]) if is_start(node) and "reduce_scatter" in str(node.target)]
    own = [node for node in starts if _leads_only_to(node, grad)]
    return own[0].all_input_nodes[0] if len(own) == 1 else None


def _leads_only_to(node: Node, grad: Node) -> bool:
    open_nodes = [node]
    while open_nodes:
        node = open_nodes.pop()
        users = [user for user in node.users if user.op != "output"]
        if node is not grad and len(users) != len(node.users):
            return False
        open_nodes.extend(users)
    return True
