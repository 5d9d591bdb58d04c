"""Graphs compiled with inductor, each once: stages of the same shape share them."""

from __future__ import annotations

import importlib
import logging
import operator
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from .multiplexing import communicates

logger = logging.getLogger(__name__)

Compiled = Callable[[list[Tensor]], tuple[Any, ...]]

_compiled: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
"""Those that a stage still runs, by all that inductor's code depends on."""


def compile_graph(graph: GraphModule, what: str) -> Compiled:
    """What `graph.forward` does, compiled with inductor; random numbers are drawn as uncompiled.

    Takes a list, which it empties. The log names the graph and the seconds that it took.

    Args:
        what: names the graph in the log.

    Raises:
        RuntimeError: there is no compiler for the device.
    """
    placeholders = graph.graph.find_nodes(op="placeholder")
    examples = [node.meta["val"] for node in placeholders]
    metas = tuple((tuple(e.shape), e.stride(), e.dtype, e.device) for e in examples)
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants of its own
        return _compile(graph, examples, what)
    key = (graph.code, metas, *_settings())
    compiled: Compiled | None = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(graph, examples, what)
    return compiled


def _settings() -> tuple[Any, ...]:
    """What torch is set to, which is compiled in."""
    inductor: Any = importlib.import_module("torch._inductor.config")
    return (torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), inductor.get_hash())


def _compile(graph: GraphModule, examples: list[Any], what: str) -> Compiled:
    num_nodes = sum(node.op == "call_function" for node in graph.graph.nodes)
    logger.info("compiling %s, %d operators", what, num_nodes)
    start = time.perf_counter()
    inductor: Any = importlib.import_module("torch._inductor")
    try:
        # Which would put each wait of a communication next to its start.
        in_order = {"reorder_for_peak_memory": False} if communicates(graph) else {}
        # A replay of a graph of inductor's own would write to outputs that a message still reads.
        alone = {"fallback_random": True, "triton.cudagraphs": False}
        with inductor.config.patch({**alone, **in_order}):
            function = inductor.compile(GraphModule(graph, _taking_a_list(graph.graph)), [examples])
    except Exception as error:
        if any(name in f"{type(error).__name__} {error}" for name in ("InvalidCxxCompiler", "TritonMissing")):
            raise RuntimeError(
                f"inductor needs a compiler ({error}): install one (g++ for the CPU, triton for an accelerator), or "
                'capture without compile="inductor".'
            ) from error
        raise
    logger.info("compiled %s in %.1f s", what, time.perf_counter() - start)
    return partial(_run, function)


def _taking_a_list(graph: Graph) -> Graph:
    """The same graph, with its arguments in a list that inductor empties, so that each is freed after its last use."""
    taking = Graph()
    arguments = taking.placeholder("arguments")
    arguments.meta["steal_arg"] = True
    placeholders = graph.find_nodes(op="placeholder")
    items = [taking.call_function(operator.getitem, (arguments, number)) for number in range(len(placeholders))]
    taking.output(taking.graph_copy(graph, dict(zip(placeholders, items))))
    return taking


def _run(function: Callable[..., Any], arguments: list[Tensor]) -> tuple[Any, ...]:
    with torch.no_grad():
        return tuple(function(arguments))
