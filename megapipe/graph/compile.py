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
from torch.fx import Graph, GraphModule, Node

from .multiplexing import PART, communicates
from .symbolic_sizes import OneMode, is_symbolic

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
    graph, examples, facts = _in_one_mode(graph)
    metas = tuple(_look(example) for example in examples)
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants of its own
        return _compile(graph, examples, what)
    key = (graph.code, metas, facts, *_settings())
    compiled: Compiled | None = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(graph, examples, what)
    return compiled


def _in_one_mode(graph: GraphModule) -> tuple[GraphModule, list[Any], tuple[str, ...]]:
    """A graph, examples of its inputs, and facts about their sizes. Of a graph that is made of two, and of one with
    sizes that depend on values, they are made anew: inductor takes inputs of one trace only, and it is to find out
    about the values in between by itself."""
    nodes = list(graph.graph.nodes)
    examples = [(node.meta.get(PART), node.meta["val"]) for node in nodes if node.op == "placeholder"]
    is_mixed = any(part is not None for part, _ in examples)
    if not is_mixed and not any(is_symbolic(value) for node in nodes for value in _values(node)):
        return graph, [value for _, value in examples], ()
    mode = OneMode()
    moved = [mode.move(*example) for example in examples]
    copied = Graph()
    copied.set_codegen(graph.graph._codegen)
    copied.output(copied.graph_copy(graph.graph, {}))
    for node in copied.nodes:
        node.meta = {}
    return GraphModule(graph, copied), moved, tuple(mode.check_facts())


def _values(node: Node) -> list[Any]:
    value = node.meta.get("val")
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _look(example: Any) -> tuple[str, ...]:
    """All that inductor's code depends on."""
    if not isinstance(example, Tensor):
        return (str(example),)
    return tuple(map(str, (tuple(example.shape), example.stride(), example.dtype, example.device)))


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
