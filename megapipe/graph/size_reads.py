"""Sizes on their way from an accelerator to the host, in two halves: a start, and a wait that holds the host.

A plain read holds the host until the device has done all that it was given before, and leaves it with nothing to do
afterwards. These copies run on a stream of their own: what the device is given between the two halves, by another stage
or a W, is done while the host waits and goes on.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_map

from ..overlap import fill_window
from .nodes import is_view, storage_of
from .symbolic_sizes import is_size, is_symbolic


def split_reads(owner: GraphModule) -> None:
    """Let a graph read each tensor on an accelerator that sizes come from once, in two halves."""
    on_host: dict[Node, Node] = {}
    for size in [node for node in owner.graph.nodes if is_size(node) and node.target is _READ]:
        value = size.args[0]
        assert isinstance(value, Node)
        copied = storage_of(value)
        source = copied
        if copied.target is torch.ops.aten._to_copy.default and "dtype" not in copied.kwargs:  # .cpu()
            source = copied.all_input_nodes[0]
        if _is_on_accelerator(source):
            if source not in on_host:
                on_host[source] = _insert_read(owner, source)
            size.replace_input_with(value, _same_view(owner, value, {copied: on_host[source]}))


_READ = torch.ops.aten._local_scalar_dense.default


def _is_on_accelerator(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.device.type not in ("cpu", "meta") and not is_symbolic(value)


def _insert_read(owner: GraphModule, source: Node) -> Node:
    with owner.graph.inserting_after(source):
        start = owner.graph.call_function(torch.ops.megapipe.start_read.default, (source,))
    with owner.graph.inserting_after(start):
        finish = owner.graph.call_function(torch.ops.megapipe.finish_read.default, (start, source))
    start.meta = finish.meta = {**source.meta, "val": torch.empty_like(source.meta["val"], device="cpu")}
    return finish


def _same_view(owner: GraphModule, view: Node, of: dict[Node, Node]) -> Node:
    """`view` of what has taken the place of the tensor that it is of."""
    if view not in of:
        assert is_view(view), view
        source = view.all_input_nodes[0]
        moved = _same_view(owner, source, of)
        with owner.graph.inserting_before(view):
            of[view] = owner.graph.node_copy(view, lambda node: moved if node is source else node)
        of[view].meta = {**view.meta, "val": tree_map(lambda one: one.to("cpu"), view.meta["val"])}
    return of[view]


# The two halves


def start_read(x: Tensor) -> Tensor:
    """Memory on the host, where `x` will be."""
    if x.is_cpu:
        return x.clone()
    device, stream = torch.get_device_module(x.device), _stream_of(x.device)
    stream.wait_stream(device.current_stream(x.device))
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True)
    with device.stream(stream):
        host.copy_(x, non_blocking=True)
    return host


def finish_read(host: Tensor, x: Tensor) -> Tensor:
    """What `start_read(x)` has copied. The host waits for it, and the device does not."""
    if not x.is_cpu:
        _stream_of(x.device).synchronize()
    return host.clone()


def finish_in_window(host: Tensor, x: Tensor) -> Tensor:
    """The same, after the overlap window is filled."""
    fill_window()
    return finish_read(host, x)


@functools.cache
def _stream_of(device: torch.device) -> Any:
    return torch.get_device_module(device).Stream(device)


_torchs: Any = torch.library  # whose functions have no types
_library = _torchs.Library("megapipe", "FRAGMENT")
_library.define("start_read(Tensor x) -> Tensor")
_library.define("finish_read(Tensor host, Tensor x) -> Tensor")
_library.impl("start_read", start_read, "CompositeExplicitAutograd")
_library.impl("finish_read", finish_read, "CompositeExplicitAutograd")
_torchs.register_fake("megapipe::start_read", lambda x: torch.empty_like(x, device="cpu"), lib=_library)
_torchs.register_fake("megapipe::finish_read", lambda host, x: torch.empty_like(host), lib=_library)
