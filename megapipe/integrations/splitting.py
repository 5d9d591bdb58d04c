"""Any module, cut into stages: torch.export writes its forward as a graph, and each stage runs a part of it.

    chunks = split(model, example, "zbv")  # this rank's PipelineStages

A graph has all operations of the forward in their order, whatever code they come from. A stage is a run of them: it has
the parameters that they read, and receives the tensors that were made before and are read in it or behind it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from ..activations import restores_of
from ..config import PipelineConfig
from ..runtime import stages_for_rank
from ..stages import PipelineStage
from ..structure import GraphFacts
from ..training import TiedWeights
from ..weight_grad import embedding, linear
from .exported import CannotSplitError, Trace, state_of

aten = torch.ops.aten


def split(
    model: nn.Module,
    example: Any,
    schedule: Any,
    *,
    num_chunks: int | None = None,
    points: Sequence[str] | None = None,
    config: PipelineConfig | None = None,
) -> list[PipelineStage]:
    """This rank's stages of a module that knows nothing of pipelines. Every rank calls it, with the same module, after
    `parallel_state.initialize_model_parallel`.

    torch.export makes a graph of the forward, one for `train()` and one for `eval()`. Stages have as many
    floating-point operations as others, as far as that goes, and begin where few bytes are sent. Names and parameters
    are those of `model`: delete it afterwards, so that only this rank's parameters are left. A module on the meta
    device stays there. Linear layers and embeddings leave their weight gradients to W.

    Args:
        model: its forward takes its arguments by position. It is not changed.
        example: its arguments, on its device: a tensor, or a tuple. All microbatches must have these shapes, and these
            arguments besides tensors.
        schedule: its name, or what `get_forward_backward_func` returned.
        num_chunks: per rank, where the schedule leaves that open.
        points: the names of the modules with whose first calls the second stage and those behind it begin.
        config: of the pipeline, for all stages. Set its autocast before: dtypes that a forward asks for (`x.dtype`) are
            those that it has here.

    Returns:
        One `PipelineStage` for each of this rank's stages.

    Raises:
        CannotSplitError: a ValueError, where torch.export refuses the module, or a stage would write to a tensor that
            another one reads.
        ValueError: there are too few operations, or a point is none.
    """
    arguments = _apart(example if isinstance(example, tuple) else (example,))
    own = stages_for_rank(schedule, num_chunks=num_chunks)
    config = PipelineConfig() if config is None else config
    num_stages, name = own[0].num_stages, type(model).__name__
    if len({module.training for module in model.modules()}) > 1:
        raise CannotSplitError(
            f"{name} cannot be split: some modules are in training mode and some are not: call train() or eval()."
        )
    with ExitStack() as after:
        for restore in restores_of(torch.device("cpu"), [model]):  # exporting writes to what a forward writes to
            after.callback(restore)
        after.callback(model.train, model.training)
        after.enter_context(_autocast(config, arguments))
        training, evaluating = Trace(model, arguments, True), Trace(model, arguments, False)
    training.cut(num_stages, points)
    evaluating.follow(training)
    for trace in (training, evaluating):
        trace.check_writes((training, evaluating))
    state = SplitState(model, training, evaluating)
    chunks = []
    for info in own:
        part = Part((training, evaluating), state, info.index, arguments).train(model.training)
        chunks.append(PipelineStage(part, info, config))
    for names in state.ties():
        TiedWeights(chunks, names).sum_in_steps(chunks)
    return chunks


def _autocast(config: PipelineConfig, arguments: Any) -> AbstractContextManager[Any]:
    """That of the steps, so that a forward that asks for a dtype is told the one that it will have."""
    device = next((one.device.type for one in pytree.tree_leaves(arguments) if torch.is_tensor(one)), "meta")
    if not config.enable_autocast or device == "meta":
        return nullcontext()
    return torch.autocast(device, config.autocast_dtype or config.pipeline_dtype, cache_enabled=False)


def _apart(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, with views of a tensor that is there twice: a graph would take it for one argument."""
    seen = set[int]()

    def apart(one: Any) -> Any:
        is_known = id(one) in seen
        seen.add(id(one))
        return one.view_as(one) if is_known and torch.is_tensor(one) else one

    return pytree.tree_map(apart, example)  # type: ignore[no-any-return]


class SplitState:
    """The parameters and buffers of the parts, and their names."""

    def __init__(self, model: nn.Module, *traces: Trace) -> None:
        self.tensors = {id(tensor): tensor for _, tensor in state_of(model)}
        self.persistent = model.state_dict(keep_vars=True).keys()
        readers: dict[int, dict[int, set[str]]] = {key: defaultdict(set) for key in self.tensors}
        for trace in traces:
            for node in trace.values:
                for user in node.users.keys() & trace.stage_of.keys():
                    called = [name for name, *_ in (user.meta.get("nn_module_stack") or {}).values()]
                    if id(trace.values[node]) in readers:
                        readers[id(trace.values[node])][trace.stage_of[user]].update(called[-1:])
                if node in trace.outputs and id(trace.values[node]) in readers:
                    readers[id(trace.values[node])].setdefault(trace.last, set())
        home = 0
        for stages in readers.values():  # a tensor that none reads is on the stage of the one before it
            home = min(stages or [home])
            stages.setdefault(home, set())
        names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in state_of(model):
            names[id(tensor)].append(name)
        self.names = {key: _names_by_stage(own, readers[key]) for key, own in names.items()}
        """The names of each tensor by the stages that have it."""

    def name(self, value: Any, stage: int) -> str:
        """The name by which a stage reads a tensor; empty where it is none of the model's."""
        return self.names[id(value)][stage][0] if id(value) in self.names else ""

    def of_stage(self, stage: int) -> dict[str, Tensor]:
        """Those of a stage by their names. A parameter of several stages is copied."""
        found: dict[str, Tensor] = {}
        for key, tensor in self.tensors.items():
            if stage in self.names[key]:
                is_copy = isinstance(tensor, nn.Parameter) and stage != min(self.names[key])
                if is_copy and (tensor._backward_hooks or tensor._post_accumulate_grad_hooks):
                    raise CannotSplitError(
                        f"{self.names[key][stage][0]} has hooks, and several stages read it, each by a copy: "
                        "register them on the stages' parameters."
                    )
                own = nn.Parameter(tensor.detach().clone(), tensor.requires_grad) if is_copy else tensor
                vars(own).update(vars(tensor))  # marks, by which optimizers group parameters
                found |= dict.fromkeys(self.names[key][stage], own)
        return found

    def ties(self) -> list[list[str]]:
        """The names of parameters that are trained on several stages."""
        ties = []
        for key, tensor in self.tensors.items():
            by_stage = [names for _, names in sorted(self.names[key].items())]
            if isinstance(tensor, nn.Parameter) and len(by_stage) > 1:
                first = {names[0] for names in by_stage}
                ties.append([name for names in by_stage for name in names if name in first])
        return ties


def _names_by_stage(names: list[str], readers: Mapping[int, set[str]]) -> dict[int, list[str]]:
    """Each stage has those of the modules that it calls, or else the first."""
    found = {
        stage: [name for name in names if name.rpartition(".")[0] in called] or names[:1]
        for stage, called in readers.items()
    }
    first = found[min(found)]
    first += [name for name in names if not any(name in own for own in found.values())]
    first.sort(key=names.index)  # of several names of a parameter the first counts
    return found


class Part(nn.Module):
    """The operations of one stage, in training and in evaluation, over the same parameters and buffers."""

    calls_no_modules = True
    """Those in it only hold parameters: it wraps none, one called `module` neither."""

    def __init__(self, traces: Sequence[Trace], state: SplitState, stage: int, arguments: tuple[Any, ...]) -> None:
        super().__init__()
        self._structure = _shared(pytree.tree_structure(arguments)) if stage == 0 else None
        self._leaves = [one.to("meta") if torch.is_tensor(one) else one for one in pytree.tree_leaves(arguments)]
        for name, tensor in state.of_stage(stage).items():
            _put(self, name, tensor, name in state.persistent)
        self._runs: dict[bool, Callable[..., Any]] = {}
        self._structures: dict[bool, Callable[[], Any]] = {}
        for trace in traces:
            self._runs[trace.training] = self._compile(trace, state, stage)
            if stage == trace.last:
                self._structures[trace.training] = _shared(trace.structure)
        self._facts = GraphFacts(self, reads_values=False)

    def find_change(self) -> str | None:
        """What has changed in its modules, which are never called. Steps ask before they begin."""
        change = self._facts.find_change(self)
        if change is None and any(part.training is not self.training for part in self.modules()):
            name = next(name for name, part in self.named_modules() if part.training is not self.training)
            change = f"its part {name} is in {'evaluation' if self.training else 'training'} mode by itself"
        if change is None:
            return None
        return (
            f"a module was split, and its stages run the operations that it had then, so they do not know that "
            f"{change}: put that back, or change the module and split it again."
        )

    def _compile(self, trace: Trace, state: SplitState, stage: int) -> Callable[..., Any]:
        """The forward of this stage."""
        graph, is_last = fx.Graph(), stage == trace.last
        known = {node: graph.placeholder(node.name) for node in trace.crossing(stage)}
        for node in trace.crossing(stage) if stage else ():
            order = trace.orders.get(node, [])
            known[node] = _permuted(known[node], [order.index(dim) for dim in range(len(order))])
        for node in trace.received_and_written(stage):  # a leaf of autograd, which may not be written to
            known[node] = graph.call_function(aten.clone.default, (known[node],))
        own = [node for node in trace.nodes if trace.stage_of[node] == stage]
        read = {one for node in own for one in node.all_input_nodes}
        for number, (node, value) in enumerate(trace.values.items()):
            if node in read or (is_last and node in trace.outputs):
                name = state.name(value, stage)
                if not name:
                    name = f"constants_{trace.training}.{number}"
                    _put(self, name, _deferring_graph(value) if isinstance(value, fx.GraphModule) else value, False)
                known[node] = graph.get_attr(name)
        for node in own:
            known[node] = graph.node_copy(node, known.__getitem__)
            if node.target is aten.view.default and not trace.memory[node] & trace.changed:
                known[node].target = aten.reshape.default  # messages are contiguous, also where the tensor was not
        _defer(graph)
        if is_last:
            graph.output([known.get(one, one) for one in trace.outputs])
        else:
            graph.output([_permuted(known[one], trace.orders.get(one)) for one in trace.crossing(stage + 1)])
        return type(fx.GraphModule(self, graph)).forward

    def forward(self, *arguments: Any) -> Any:
        """Takes the arguments of the model on the first stage, and on others the tensors received."""
        if self._structure is not None:
            arguments = tuple(self._checked(self._structure(), arguments))
        elif len(arguments) == 1 and isinstance(arguments[0], tuple):
            (arguments,) = arguments
        outputs = self._runs[self.training](self, *arguments)
        if self.training in self._structures:
            return pytree.tree_unflatten(outputs, self._structures[self.training]())
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _checked(self, structure_of_example: Any, arguments: tuple[Any, ...]) -> list[Any]:
        """The leaves of the arguments, where they are like the example's."""
        leaves, structure = pytree.tree_flatten(arguments)
        given, wanted = [_form(one) for one in leaves], [_form(one) for one in self._leaves]
        if structure != structure_of_example or given != wanted:
            raise ValueError(
                f"a module that was split takes arguments like the example's, {wanted}, got {given}: pad them, or "
                "split it with these."
            )
        return leaves


def _shared(value: Any) -> Callable[[], Any]:
    """Copies of a function have its values in common, and torch warns where a structure of its pytrees is copied."""
    return lambda: value


def _form(leaf: Any) -> Any:
    return f"{leaf.dtype} {list(leaf.shape)}" if torch.is_tensor(leaf) else leaf


def _put(module: nn.Module, name: str, value: Any, persistent: bool) -> None:
    """Give a module a parameter, a buffer or another module by its full name."""
    *path, last = name.split(".")
    for part in path:
        if part not in module._modules:
            module.add_module(part, nn.Module())
        module = module.get_submodule(part)
    if isinstance(value, nn.Module):
        module.add_module(last, value)
    elif isinstance(value, nn.Parameter):
        module.register_parameter(last, value)
    else:
        module.register_buffer(last, value, persistent)


def _embedding(weight: Tensor, tokens: Tensor, padding_idx: int = -1) -> Tensor:
    return embedding(tokens, weight, None if padding_idx < 0 else padding_idx)


DEFERRING: Mapping[Any, Callable[..., Tensor]] = {aten.linear.default: linear, aten.embedding.default: _embedding}


def _permuted(node: fx.Node, order: Sequence[int] | None) -> fx.Node:
    """A tensor whose dimensions lie in memory in that order, or did, is sent as it lies there."""
    return node.graph.call_function(aten.permute.default, (node, [*order])) if order else node


def _defer(graph: fx.Graph) -> None:
    """Let layers leave their weights' gradients to W."""
    for node in graph.nodes:
        if node.target in DEFERRING and not (node.target is aten.embedding.default and any(node.args[3:])):
            node.target = DEFERRING[node.target]


def _deferring_graph(module: fx.GraphModule) -> fx.GraphModule:
    """That of a region, with copies in place of views where nothing in it is written to."""
    calls = module.graph.find_nodes(op="call_function", target=aten.view.default)
    if not any(getattr(getattr(node.target, "_schema", None), "is_mutable", False) for node in module.graph.nodes):
        for node in calls:
            node.target = aten.reshape.default  # messages are contiguous, also where the tensor was not
    _defer(module.graph)
    module.recompile()
    return module
