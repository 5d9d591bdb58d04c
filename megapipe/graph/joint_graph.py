"""Forward and backward of a function as one graph, labelled. The one file that knows torch's tracer.

The tracer is AOTAutograd's, the one behind torch.compile: `aot_export_joint_with_descriptors`, private to torch, in it
from 2.9 on. Its graph is functional (no operator changes a tensor), and each input and output is described.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from ..weight_grad import capturing
from .errors import CaptureError, line_in
from .nodes import drop_idle_views
from .size_reads import split_reads
from .strides import lay_out_as_traced
from .symbolic_sizes import SizesRead

_FOREIGN = (
    "it uses a tensor that is no parameter, buffer or input of its own, or one from a cache: register it as a buffer, "
    "pass it in"
)
_MEMORY = (
    "it reads a tensor's memory by itself, as data_ptr(), numpy(), kernels that are no operators of torch and cuDNN's "
    "recurrent layers do: make that an operator (torch.library.custom_op), switch cuDNN off there "
    "(torch.backends.cudnn.flags)"
)
_REFUSED = {
    "convert all Tensors to FakeTensors": _FOREIGN,
    "Unexpected fake buffer": _FOREIGN,
    "data pointer": _MEMORY,
    "numpy() is not supported": _MEMORY,
}
"""What torch says of a forward, and what is said instead."""
_NO_ALIAS = ("non_alias", "unsafe_view_alias", "custom_function_view")


@dataclass(frozen=True)
class Joint:
    """A graph that computes a function's outputs from its inputs, and the inputs' gradients from the outputs'.

    All lists hold nodes of `owner.graph`, whose own order of inputs and outputs means nothing.
    """

    owner: GraphModule
    """Its nodes are in an order in which the function and its backward ran; no node writes to a tensor."""
    inputs: list[Node]
    """One per input tensor."""
    outputs: list[Node]
    """One per output tensor."""
    tangents: list[Node | None]
    """One per output: the placeholder of its gradient; None where it has none."""
    mutated: dict[int, Node]
    """The new values of inputs that the function changes in place, by their number."""
    grads: list[Node | None]
    """One per input: its gradient; None where it wants none or the outputs do not depend on it."""


def trace_joint(function: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Tensor], what: str) -> Joint:
    """The joint graph of `function(*inputs)` for inputs of these shapes, dtypes, devices and `requires_grad`.

    The function is run a few times, on tensors without values. The effect of torch.utils.checkpoint is not in the
    graph: a checkpointed part is run once (see `recompute`). Outputs that share memory with inputs or each other are
    copied in the graph. Whole numbers that it reads from tensors are nodes, and may be sizes of tensors within.

    Args:
        what: names the function in errors.

    Raises:
        CaptureError: the function goes by values of tensors otherwise, as an `if` does, or what it returns has sizes
            that depend on them. It names the line.
    """
    values_are_asked_for = _asking_for_values()
    try:
        return _trace(function, tuple(inputs), what)
    except values_are_asked_for:
        read = SizesRead(what)  # a trace of tensors with values takes no sizes from them
    try:
        joint = _trace(function, read.without_values(inputs), what)
    except values_are_asked_for as error:
        line = line_in(traceback.extract_tb(error.__traceback__))
        raise CaptureError(
            f"{what} cannot be captured: at {line} it goes by the values of a tensor, and a graph is the same for all "
            "values. Write it without (torch.where instead of an if), say what is so of a size for all values "
            "(torch._check(sum(sizes) == len(x))), or leave this stage eager."
        ) from error
    _refuse_values(joint, read, what)
    read.insert_checks(joint.owner)
    split_reads(joint.owner)
    return joint


def _asking_for_values() -> tuple[type[Exception], ...]:
    """What torch raises where a function goes by values of tensors that have none."""
    shapes = importlib.import_module("torch.fx.experimental.symbolic_shapes")
    fake = importlib.import_module("torch._subclasses.fake_tensor")
    return (
        shapes.GuardOnDataDependentSymNode,
        fake.DataDependentOutputException,
        fake.DynamicOutputShapeException,
        shapes.PendingUnbackedSymbolNotFound,
    )


def _trace(function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...], what: str) -> Joint:
    exporter: Any = importlib.import_module("torch._functorch.aot_autograd").aot_export_joint_with_descriptors
    copied: tuple[int, ...] = ()
    while True:
        with ExitStack() as stack, capturing():
            exported = _export(exporter, stack, _Function(function, copied), inputs, what)
        aliases = [
            number
            for number, info in enumerate(exported._aot_state.fw_metadata.output_info)
            if info.output_type.name not in _NO_ALIAS
        ]
        if not aliases:
            break
        assert not copied, "a copy is no alias"
        copied = tuple(aliases)
    drop_idle_views(exported.graph_module)
    _let_views_copy(exported.graph_module)
    joint = _label(exported.graph_module, len(inputs), what)
    lay_out_as_traced(joint.owner)
    return joint


class _Function(nn.Module):
    """The tracer takes modules."""

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], copied: tuple[int, ...]) -> None:
        super().__init__()
        self._function, self._copied = function, copied

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = self._function(*inputs)
        return tuple(output.clone() if n in self._copied else output for n, output in enumerate(outputs))


def _export(
    exporter: Callable[..., Any], stack: ExitStack, function: nn.Module, inputs: tuple[Tensor, ...], what: str
) -> Any:
    # As eager: the backward is not under the autocast of the forward. And the nodes remember their lines.
    config = importlib.import_module("torch._functorch.config")
    stack.enter_context(config.patch(backward_pass_autocast="off"))
    stack.enter_context(importlib.import_module("torch.fx.traceback").preserve_node_meta())
    try:
        return exporter(stack, function, inputs)
    except (AssertionError, RuntimeError) as error:
        found = [sentence for said, sentence in _REFUSED.items() if said in str(error)]
        if not found:
            raise
        line = line_in(traceback.extract_tb(error.__traceback__))
        raise CaptureError(f"{what} cannot be captured: at {line} {found[0]}, or leave this stage eager.") from error


def _let_views_copy(owner: GraphModule) -> None:
    """A view copies where it must. The strides that the tracer goes by are not always those of the operators at work (a
    batch norm of a transposed tensor), and no node writes, so that nothing goes by what shares memory."""
    for node in owner.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default


def _label(owner: GraphModule, num_inputs: int, what: str) -> Joint:
    inputs: dict[int, Node] = {}
    tangent_of: dict[int, Node] = {}
    outputs: dict[int, Node] = {}
    mutated: dict[int, Node] = {}
    grads: dict[int, Node | None] = {}
    for node in owner.graph.find_nodes(op="placeholder"):
        described = node.meta["desc"]
        kind = type(described).__name__
        if kind == "PlainAOTInput":
            inputs[described.idx] = node
        elif kind in ("ViewBaseAOTInput", "SyntheticBaseAOTInput"):
            raise CaptureError(
                f"{what} cannot be captured: it changes a tensor in place that shares its memory with another of its "
                "parameters, buffers or inputs, which a graph would not change with it. Give each memory of its own "
                "(clone()), or leave this stage eager."
            )
        elif kind == "ForwardTokenAOTInput":
            raise CaptureError(
                f"{what} cannot be captured: it has an operator with side effects, as torch.linalg's checks for "
                "singular matrices are, which a graph would have to order. Leave this stage eager."
            )
        else:
            assert kind == "TangentAOTInput", described
            if type(described.output).__name__ == "PlainAOTOutput":  # else that of a changed input
                tangent_of[described.output.idx] = node
    (end,) = owner.graph.find_nodes(op="output")
    for node, described in zip(end.args[0], end.meta["desc"]):
        kind = type(described).__name__
        if kind == "PlainAOTOutput":
            outputs[described.idx] = node
        elif kind == "InputMutationAOTOutput":
            mutated[described.mutated_input.idx] = node
        elif kind == "GradAOTOutput":
            grads[described.grad_of.idx] = node
        else:
            assert node is None, described
    return Joint(
        owner,
        [inputs[n] for n in range(num_inputs)],
        [outputs[n] for n in range(len(outputs))],
        [tangent_of.get(n) for n in range(len(outputs))],
        mutated,
        [grads.get(n) for n in range(num_inputs)],
    )


def _refuse_values(joint: Joint, read: SizesRead, what: str) -> None:
    """What the stage returns, and hands on, has sizes known to all."""
    # Gradients have the sizes of what they are of.
    ends = {"returns": joint.outputs, "puts into a buffer": joint.mutated.values()}
    for verb, nodes in ends.items():
        for node in filter(None, nodes):
            if (line := read.line_of(node.meta.get("val"))) is not None:
                raise CaptureError(
                    f"{what} cannot be captured: at {line} a size depends on the values of a tensor, and the stage "
                    f"{verb} a tensor with it, of which others must know the size: pad it to a fixed one, or say it "
                    "where it is known (.view_as(x)), or leave this stage eager."
                )
