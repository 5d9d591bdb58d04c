"""A module's forward as a graph by torch.export, and the stage of each of its operations."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from ..activations import noting_draws, tensors_kept, undoing_changes
from ..graph import CaptureError, setting_no_random_state

SLACK = 0.1
"""Share of a stage's operations by which its end may move to where fewer bytes are sent."""

aten = torch.ops.aten


class CannotSplitError(ValueError):
    """The module cannot be cut, for the reason that is given."""


class Trace:
    """The forward of a module in one mode, as a graph, and the stage of each operation."""

    def __init__(self, model: nn.Module, arguments: tuple[Any, ...], training: bool) -> None:
        self.name = type(model).__name__
        self.training = training
        exported = _export(model, arguments, training)
        self.module: Any = exported.module()
        self.structure = exported.call_spec.out_spec
        graph: fx.Graph = self.module.graph
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.nodes = [node for node in graph.nodes if node.op == "call_function" and not _is_assert(node)]
        values = {n: operator.attrgetter(str(n.target))(self.module) for n in graph.nodes if n.op == "get_attr"}
        if any(getattr(node.target, "__module__", "") == "torch._functorch.predispatch" for node in self.nodes):
            raise CannotSplitError(
                f"{self.name} cannot be split: its forward uses torch.vmap or torch.func, whose levels a stage would "
                "have to enter and to leave."
            )
        self.outputs: list[Any] = pytree.tree_leaves(next(iter(reversed(graph.nodes))).args)
        own = {id(one): one for one in (*model.parameters(), *model.buffers())}
        known = {_memory(one): one for one in own.values()}  # constants to torch.export, if in a list or a closure
        self.values = {
            n: known.get(_memory(one), one) if torch.is_tensor(one) and id(one) not in own else one
            for n, one in values.items()
        }
        """Parameters, buffers, constants, and the graphs of regions without gradients or with autocast."""
        if strange := [type(one).__name__ for one in values.values() if not isinstance(one, (Tensor, nn.Module))]:
            raise CannotSplitError(
                f"{self.name} cannot be split: its forward uses a {strange[0]}, which a stage cannot have."
            )
        self.stage_of: dict[fx.Node, int] = dict.fromkeys(self.inputs, 0)
        self.last = 0
        play = _Play(self.module)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode, play.counter:
            leaves = pytree.tree_leaves(arguments)
            try:
                play.run(*(mode.from_tensor(leaf) if torch.is_tensor(leaf) else leaf for leaf in leaves))
            except RuntimeError as error:
                reason = " ".join(str(error).split())[:300]
                raise CannotSplitError(f"{self.name} cannot be split: its graph does not run: {reason}") from error
        self.operations, self.nbytes, self.memory, self.orders = play.operations, play.nbytes, play.memory, play.orders
        self.writes = {n: [self.memory[written] for written in _written(n, self.values)] for n in self.nodes}
        """The memory of each tensor that an operation writes to."""
        self.changed = set().union(*(memory for writes in self.writes.values() for memory in writes))
        """All of it."""

    def cut(self, num_stages: int, points: Sequence[str] | None) -> None:
        """Find the stage of each operation."""
        if len(self.nodes) < num_stages:
            raise ValueError(f"{self.name} has {len(self.nodes)} operations: too few for {num_stages} stages.")
        self._begin_at(self._even(num_stages) if points is None else self._named(points, num_stages))

    def follow(self, other: Trace) -> None:
        """Find the stage of each operation by where another graph of the module reads its parameters and buffers."""
        homes = {id(other.values[node]): stages[0] for node, stages in other.readers().items() if len(stages) == 1}
        read: list[tuple[int, int]] = []
        for place, node in enumerate(self.nodes):
            stages = (homes.get(id(self.values.get(one))) for one in node.all_input_nodes)
            read += [(place, stage) for stage in stages if stage is not None]
        sent, starts = self._bytes_between(), [0]
        for stage in range(1, other.last + 1):
            first = max((place + 1 for place, home in read if home < stage), default=1)
            last = min((place for place, home in read if home >= stage), default=len(self.nodes))
            places = range(max(first, starts[-1]), max(first, starts[-1], last) + 1)
            starts.append(min(places, key=sent.__getitem__))
        self._begin_at(starts)

    def _begin_at(self, starts: Sequence[int]) -> None:
        """Let each stage begin at the operation with this number."""
        self.last = len(starts) - 1
        for place, node in enumerate(self.nodes):
            self.stage_of[node] = sum(start <= place for start in starts) - 1
        self._settle()

    def _settle(self) -> None:
        """Tuples stay with their items, and what is made of parameters or of nothing is made where it is first read."""
        pure = set(self.values)
        for node in self.nodes:
            if node.target is operator.getitem:
                self.stage_of[node] = self.stage_of[node.args[0]]
            if node.target is aten.copy_.default and node.args[0] in self.values:  # a buffer that is set anew
                self.stage_of[node] = self.stage_of.get(node.args[1], self.stage_of[node])
            touched = set().union(*(self.memory[one] for one in (node, *node.all_input_nodes)))
            if all(one in pure for one in node.all_input_nodes) and not touched & self.changed:
                pure.add(node)  # what is written to keeps its order
        for node in reversed(self.nodes):
            if node in pure:
                users = [self.stage_of[user] for user in node.users if user in self.stage_of]
                self.stage_of[node] = min(users, default=self.stage_of[node])

    def _even(self, num_stages: int) -> list[int]:
        """The operations with which stages begin, by operations done and bytes sent."""
        least = max(1, sum(self.operations.values())) * 1e-6
        done = [0.0, *accumulate(max(self.operations.get(node, 0), least) for node in self.nodes)]
        sent = self._bytes_between()
        share, starts = done[-1] / num_stages, [0]
        for number in range(1, num_stages):
            places = range(starts[-1] + 1, len(self.nodes) - num_stages + number + 1)
            ends = [place for place in places if self.nodes[place].target is not operator.getitem] or [*places]
            away = {place: max(0.0, abs(done[place] - number * share) / share - SLACK) for place in ends}
            starts.append(min(ends, key=lambda place: (away[place], sent[place])))
        return starts

    def _bytes_between(self) -> list[int]:
        """The bytes of what is made before each operation and read in it or behind it."""
        places = {node: place for place, node in enumerate(self.nodes)}
        changes = [0] * (len(self.nodes) + 2)
        for node in (*self.inputs, *self.nodes):
            users = [places.get(user, len(self.nodes)) for user in node.users if not _is_assert(user)]
            changes[places.get(node, -1) + 1] += self.nbytes[node]
            changes[max(users, default=places.get(node, -1)) + 1] -= self.nbytes[node]
        return list(accumulate(changes))

    def _named(self, points: Sequence[str], num_stages: int) -> list[int]:
        """The operations with which the first calls of these modules begin."""
        first: dict[str, int] = {}
        for place, node in enumerate(self.nodes):
            for name, *_ in (node.meta.get("nn_module_stack") or {}).values():
                first.setdefault(name, place)
        names = [name for name in first if name]
        if unknown := [point for point in points if point not in names]:
            raise ValueError(
                f"{unknown[0]!r} is no module that {self.name} calls: take some of {', '.join(names[:20])}."
            )
        starts = [0, *(first[point] for point in points)]
        if len(starts) != num_stages or sorted(set(starts)) != starts:
            raise ValueError(
                f"{num_stages} stages take {num_stages - 1} points in the order of calls, got {list(points)}."
            )
        return starts

    def readers(self) -> dict[fx.Node, list[int]]:
        """The stages that read each parameter and each buffer."""
        return {
            node: sorted(
                {self.stage_of[user] for user in node.users if user in self.stage_of}
                | ({self.last} if node in self.outputs else set())
            )
            for node in self.values
        }

    def crossing(self, stage: int) -> list[fx.Node]:
        """The tensors that this stage receives, in the order in which they are made; the first one's arguments."""
        if stage == 0:
            return self.inputs
        return [
            node
            for node in (*self.inputs, *self.nodes)
            if self.stage_of[node] < stage
            and any((self.last if user.op == "output" else self.stage_of.get(user, 0)) >= stage for user in node.users)
        ]

    def check_writes(self, traces: Sequence[Trace]) -> None:
        """Raises CannotSplitError where a stage writes to a tensor that another stage has in memory of its own.

        Args:
            traces: in training and in evaluation, whose stages have the same tensors.
        """
        by_value: dict[int, set[int]] = defaultdict(set)
        for trace in traces:
            for node, stages in trace.readers().items():
                by_value[id(trace.values[node])].update(stages)
        readers = {node: sorted(by_value[id(self.values[node])]) for node in self.values}
        received = {stage: self.crossing(stage) for stage in range(1, self.last + 1)}
        for writer in self.nodes:
            stage = self.stage_of[writer]
            for memory in self.writes[writer]:
                for node, stages in readers.items():
                    if stages not in ([], [stage]) and self.memory[node] & memory:
                        raise CannotSplitError(
                            f"{self.name} cannot be split here: stage {stage} writes to {node.target}, which stages "
                            f"{stages} read. Give points by which one stage does."
                        )
                for later in range(1, stage + 1):
                    if len(views := [str(node) for node in received[later] if self.memory[node] & memory]) > 1:
                        raise CannotSplitError(
                            f"{self.name} cannot be split here: stage {stage} writes to memory that "
                            f"{' and '.join(views)} share, which stage {later} receives apart. Give points by which "
                            "one stage has them."
                        )

    def received_and_written(self, stage: int) -> list[fx.Node]:
        """What a stage has received of another and changes in place."""
        if stage == 0:
            return []
        memory = {one for n in self.nodes if self.stage_of[n] == stage for write in self.writes[n] for one in write}
        return [node for node in self.crossing(stage) if self.memory[node] & memory]


def state_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _export(model: nn.Module, arguments: tuple[Any, ...], training: bool) -> torch.export.ExportedProgram:
    """What exporting leaves in the attributes of a module, fake tensors among it, is taken out."""
    names, counted = {name for name, _ in state_of(model)}, list[str]()
    held, kept = _held(model), set[int]()
    try:
        model.train(training)
        with (
            undoing_changes(model.modules()) as changed,
            mock.patch.object(torch.autograd.Function, "apply", classmethod(_refuse_function)),
            mock.patch.object(Tensor, "register_hook", _refuse_hook),
            _without_checkpoints(),
            noting_draws() as drawn,
            setting_no_random_state("its forward"),
        ):
            model.register_forward_hook(lambda *_: counted.extend(changed()))
            model.register_forward_hook(lambda *_: kept.update(_held(model)))
            exported = torch.export.export(model, arguments, strict=False)
            made = {name for name, _ in state_of(model)} - names
        if drawn:
            raise CannotSplitError(
                f"its forward draws random numbers of {drawn[0]}, which a graph would have once and for all: draw them "
                "with torch."
            )
        if counted:
            raise CannotSplitError(
                f"its forward changes {counted[0]}, a number or the length of a list, which a graph would have once "
                "and for all: keep it in a buffer, or run the module once before, if it changes only then."
            )
        read = {id(one) for one in exported.constants.values()}
        if anew := [name for number, name in held.items() if number in read and number not in kept]:
            raise CannotSplitError(
                f"its forward reads {anew[0]} and sets it anew, which a graph would not do: register it as a buffer."
            )
        if made:
            raise CannotSplitError(
                f"its forward makes {min(made)}, which a graph takes for a change of something else: make it in the "
                "constructor, or run the module once before."
            )
        return exported
    except Exception as error:
        reason = " ".join(str(error).split())[:600]
        if not isinstance(error, (CannotSplitError, CaptureError)):
            reason = f"torch.export refuses it with {type(error).__name__}: {reason}"
        raise CannotSplitError(f"{type(model).__name__} cannot be split: {reason}") from error


def _held(model: nn.Module) -> dict[int, str]:
    """The tensors among the attributes of modules, with the attributes' names."""
    kept = [(type(m).__name__, name, of) for m in model.modules() for name, of in tensors_kept(m).items()]
    return {id(one): f"{kind}.{name}" for kind, name, of in kept for one in of}


def _refuse_function(function: type, *arguments: Any) -> Any:
    raise CannotSplitError(
        f"it calls {function.__name__}, a torch.autograd.Function, whose backward no exported graph has. (Checkpoints "
        "take use_reentrant=False; config.recompute needs none.)"
    )


def _no_checkpoint(*_: Any, **__: Any) -> Iterator[None]:
    """Around a checkpointed call: a nested one is exported as if under no_grad, and its parameters were not trained."""
    yield


def _without_checkpoints() -> Any:
    module = torch.utils.checkpoint
    names = ("_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl")  # from 2.15 on
    found: dict[str, Any] = {name: _no_checkpoint for name in names if hasattr(module, name)}
    return mock.patch.multiple(module, **found)


def _refuse_hook(tensor: Tensor, hook: Any) -> Any:
    raise CannotSplitError("its forward calls register_hook on a tensor, which no exported graph has.")


class _Play(fx.Interpreter):
    """Runs a graph on fake tensors, and notes what its nodes do."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.counter = FlopCounterMode(display=False)
        self.operations: dict[fx.Node, int] = {}
        self.nbytes: dict[fx.Node, int] = defaultdict(int)
        self.memory: dict[fx.Node, set[int]] = {}
        self.orders: dict[fx.Node, list[int]] = {}
        """The dimensions of tensors that lie in memory in another order, such as images with their channels last."""
        self._kept: list[Any] = []  # so that no two tensors have the same memory one after the other

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_module" or _is_assert(n):
            return None
        before = self.counter.get_total_flops()
        output = super().run_node(n)
        self.operations[n] = self.counter.get_total_flops() - before
        tensors = [leaf for leaf in pytree.tree_leaves(output) if torch.is_tensor(leaf)]
        self.memory[n] = {tensor.untyped_storage()._cdata for tensor in tensors}
        self._kept.append(tensors)
        if torch.is_tensor(output):
            self.nbytes[n] = output.nbytes
            if output.layout is torch.strided and not output.is_contiguous():
                order = sorted(range(output.dim()), key=output.stride, reverse=True)
                if output.permute(order).is_contiguous():
                    self.orders[n] = order
        return output


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _is_assert(node: fx.Node) -> bool:
    """Whether it asserts a dtype, which autocast may change, or values."""
    return "assert" in str(node.target) or node.target == "_guards_fn"


def _written(node: fx.Node, values: Mapping[fx.Node, Any]) -> list[fx.Node]:
    """The arguments of a node that it writes to."""
    graphs = [values[one].graph for one in node.all_input_nodes if isinstance(values.get(one), fx.GraphModule)]
    if any(_written(inner, {}) for graph in graphs for inner in graph.nodes):
        return [one for one in node.all_input_nodes if not isinstance(values.get(one), fx.GraphModule)]
    written = []
    for place, argument in enumerate(node.target._schema.arguments if isinstance(node.target, OpOverload) else ()):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        is_statistic = argument.name in ("running_mean", "running_var") and node.args[5] is True  # of a batch norm
        if is_statistic or (argument.alias_info is not None and argument.alias_info.is_write):
            written.append(value)
    return [one for one in pytree.tree_leaves(written) if isinstance(one, fx.Node)]
