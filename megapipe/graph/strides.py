"""What kernels that take memory as it lies are given: laid out as the tracer has it.

Some operators lay out what they give otherwise than the tracer knows, as a roll, and the backward of a dropout. The
copy in front of such a kernel is not in the graph then, or the kernel was chosen for other strides, and it computes
something else without a word. All other operators go by the strides of what they are given.
"""

from __future__ import annotations

from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from .captured_arguments import laid_out
from .symbolic_sizes import is_symbolic

_KERNELS = (
    "aten::native_group_norm",
    "aten::cudnn_batch_norm",
    "aten::_weight_norm_interface",
    "aten::_cdist_backward",
    "aten::_scaled_dot_product_",
    "aten::_thnn_fused_",
    "aten::_cudnn_rnn",
    "aten::mkldnn_rnn_layer",
)
"""How the names of such operators begin: those that torch calls with what it has made contiguous, or chooses by
strides."""


def lay_out_as_traced(owner: GraphModule) -> None:
    """Copy what such a kernel is given where it has other strides at work than in the trace."""
    for node in [node for node in owner.graph.nodes if _takes_memory_as_it_lies(node)]:
        for source in node.all_input_nodes:
            traced = source.meta.get("val")
            if not isinstance(traced, Tensor) or is_symbolic(traced):
                continue
            if 0 not in traced.stride():  # what is expanded is so by a view
                with owner.graph.inserting_before(node):
                    copy = owner.graph.call_function(_as_traced, (source, traced.stride()))
                copy.meta = dict(source.meta)
                node.replace_input_with(source, copy)


def _takes_memory_as_it_lies(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.name.startswith(_KERNELS)


def _as_traced(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    places = zip(tensor.shape, tensor.stride(), stride)
    return tensor if all(size == 1 or one == other for size, one, other in places) else laid_out(tensor, stride)
