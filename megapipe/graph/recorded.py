"""Plain stages as CUDA graphs: one that is not captured is recorded as it runs, and its backward as autograd runs it.

It is recorded on copies of its parameters, which share their memory. So what belongs to the parameters themselves
happens outside, once for each unit: adding up gradients, hooks, and the choice of what is left to W. For autograd a
replay is one Function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from ..activations import current_slot
from ..chunks import parameters_replaced, unwrap
from ..weight_grad import backward_context, defer
from .arguments import Arguments, Structure
from .captured import CapturedStage
from .cuda_graphs import Recording, Slot, Slots
from .side_effects import refusing_side_effects
from .state import Mode, State

__all__ = ["captured_stages", "recording"]


def captured_stages(chunk: nn.Module) -> list[CapturedStage]:
    """Those in a chunk; none in one that runs as it is."""
    return [module for module in chunk.modules() if isinstance(module, CapturedStage)]


@contextmanager
def recording(chunks: Iterable[nn.Module]) -> Iterator[None]:
    """Around a step: forwards of chunks that are not captured run as CUDA graphs where they have a slot."""
    with ExitStack() as around:
        for chunk in chunks:
            if not captured_stages(chunk):
                around.enter_context(_stage_of(unwrap(chunk)).in_place())
        yield


def _stage_of(module: nn.Module) -> _RecordedStage:
    """The one that is kept with the module, as long as that has the same parts."""
    found: _Kept = vars(module).setdefault("_megapipe_recorded", _Kept())
    if found.stage is None or not found.stage.state.is_same():
        found.stage = _RecordedStage(module)
    return found.stage


class _Kept:
    """What a module keeps. A copy of the module, or one that is loaded, has none of it."""

    stage: _RecordedStage | None = None

    def __reduce__(self) -> Any:
        return _Kept, ()


class _RecordedStage:
    """A module, and what was recorded of it so far."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.what = f"the stage {type(module).__name__}"
        self.state = State(module)
        self.slots = Slots(self.state.tensors, self.what)
        self._forward: Callable[..., Any] = module.forward
        self._set_input_tensor: Callable[[Any], None] | None = None
        self._received: Any = None
        self._arguments: dict[tuple[Mode, bool], Arguments] = {}
        self._units: dict[tuple[int, tuple[Mode, bool]], _RecordedUnit] = {}

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The forward of the module, and what it has received, come here meanwhile."""
        self._forward = self.module.forward
        self._set_input_tensor = getattr(self.module, "set_input_tensor", None)
        own: dict[str, Any] = {"forward": self.run}
        if self._set_input_tensor is not None:
            own["set_input_tensor"] = self._receive
        attributes = vars(self.module)
        before = {name: attributes[name] for name in own if name in attributes}
        attributes.update(own)
        try:
            yield
        finally:
            for name in own:
                del attributes[name]
            attributes.update(before)
            self._received = None

    def _receive(self, input_tensor: Any) -> None:
        assert self._set_input_tensor is not None
        self._received = input_tensor
        self._set_input_tensor(input_tensor)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The first unit in each mode runs as it is, which loads and tunes kernels."""
        number = current_slot()
        if number is None:
            return self._forward(*args, **kwargs)
        call = self._received, args, kwargs
        mode = self.state.mode(), torch.is_grad_enabled()
        if mode not in self._arguments:
            self._arguments[mode] = self._first(call)
            return self._forward(*args, **kwargs)
        tensors = self._arguments[mode].tensors(call)
        key = number, mode
        if key not in self._units:
            self._units[key] = _RecordedUnit(self, self.slots.slot(number), self._arguments[mode])
        return self._units[key].run(tensors)

    def _first(self, call: Any) -> Arguments:
        structure, tensors = Structure.of(call)
        opaque = structure.find_opaque()
        if opaque is not None or any(tensor.is_cpu for tensor in tensors):
            wrong = "a tensor on the CPU" if opaque is None else f"a {type(opaque).__name__} with tensors in it"
            raise ValueError(
                f"{self.what} is called with {wrong}, which a replay of its CUDA graph would not read again: pass "
                "tensors on its device, alone or in lists, tuples and dicts, or unset config.cuda_graphs."
            )
        return Arguments(call, self.what, "recorded", "unset config.cuda_graphs")

    def call(self, call: Any) -> Any:
        """The module itself."""
        received, args, kwargs = call
        if self._set_input_tensor is not None:
            self._set_input_tensor(received)
        with refusing_side_effects(self.state.modules, self.what):
            return self._forward(*args, **kwargs)


class _RecordedUnit:
    """What a stage runs for a unit in one mode, recorded in one slot.

    Attributes:
        num_weights: parameters, which are the first of the inputs.
        num_runs: forwards so far. Each overwrites what the one before has kept for its backward.
        differentiable: the numbers of the outputs that have a gradient.
    """

    def __init__(self, stage: _RecordedStage, slot: Slot, arguments: Arguments) -> None:
        self._stage, self._slot, self._arguments = stage, slot, arguments
        self.num_weights = stage.state.num_weights
        self.num_runs = 0
        self.differentiable: list[int] = []
        self._output: Structure | None = None
        self._forward: Recording | None = None
        self._backward: Recording | None = None
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        # Until the backward is recorded: the leaf of each input, and the outputs, with the graph behind them.
        self._leaves: list[Tensor | None] = []
        self._outputs: list[Tensor] = []
        self._left: list[_LeftToW] = []

    def run(self, tensors: list[Tensor]) -> Any:
        inputs = [*self._stage.state.tensors(), *tensors]
        if self._forward is None or not self._forward.reads(inputs):
            self._backward = None
            self._forward = self._slot.record(self._record_forward, inputs, "the forward")
        outputs: Sequence[Tensor] = _Replay.apply(self, *inputs)  # type: ignore[no-untyped-call]
        assert self._output is not None
        return self._output.fill(outputs)

    def replay_forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        assert self._forward is not None
        self.num_runs += 1
        return self._forward.replay(inputs)

    def replay_backward(self, weights: Sequence[Tensor], output_grads: Sequence[Tensor]) -> list[Tensor | None]:
        """The gradients of the inputs. Hands the weight gradients that layers defer to `defer`."""
        grads = [output_grads[n] for n in self.differentiable]
        if self._backward is None:
            self._backward = self._slot.record(self._record_backward, grads, "the backward")
        # Not copied: since they are held here too, autograd adds them to what is there, or copies them.
        results = list(self._backward.replay(grads, 0))
        hooked = {number for number, weight in enumerate(weights) if weight._backward_hooks}
        for number in hooked:  # which may keep what they are called with
            results[number] = None if results[number] is None else results[number].clone()
        for left in self._left:
            if left.number in hooked:  # these see a gradient before it is added
                known = results[left.number]
                results[left.number] = left.compute() if known is None else known + left.compute()
            else:
                defer(weights[left.number], left.compute, left.add_to)
        return results

    def _record_forward(self, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        stage, examples = self._stage, self._arguments.examples
        given = inputs[len(inputs) - len(examples) :]
        for tensor, example in zip(given, examples):
            tensor.requires_grad_(example.requires_grad and torch.is_grad_enabled())
        with parameters_replaced([stage.module], _copy_of) as copies:
            output = stage.call(self._arguments.structure.fill(given))
        self._output, outputs = Structure.of(output)
        if (opaque := self._output.find_opaque()) is not None:
            raise RuntimeError(f"it returns a {type(opaque).__name__} with tensors in it, unknown to torch's pytrees")
        by_parameter: dict[Any, nn.Parameter] = dict(copies)
        self._copies, self._leaves = copies, [*map(by_parameter.get, stage.state.tensors()), *given]
        self.differentiable = [n for n, t in enumerate(outputs) if t.requires_grad]
        self._outputs = [outputs[n] for n in self.differentiable]
        _check_leaves(self._outputs, self._leaves)
        return tuple(t.detach() for t in outputs)

    def _record_backward(self, grads: list[Tensor]) -> tuple[Tensor | None, ...]:
        left = _LeavingToW()
        before, backward_context.deferred = backward_context.deferred, left
        try:
            with parameters_replaced([self._stage.module], self._copies.__getitem__):  # for what is computed again
                torch.autograd.backward(self._outputs, grads)
        finally:
            backward_context.deferred = before
        leaves, self._leaves, self._outputs = self._leaves, [], []
        numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
        self._left = [_LeftToW(self._slot, numbers[id(weight)], compute) for weight, compute in left.computations]
        gradients = tuple(None if leaf is None else leaf.grad for leaf in leaves)
        for leaf in leaves:
            if leaf is not None:
                leaf.grad = None
        return gradients


class _LeavingToW:
    """Takes what layers defer in the backward that is recorded."""

    def __init__(self) -> None:
        self.saved: list[Any] = []
        self.computations: list[tuple[Tensor, Callable[[], Tensor]]] = []
        self._thread = threading.get_ident()

    def is_under_way(self) -> bool:
        return threading.get_ident() == self._thread

    def add(
        self, weight: Tensor, compute: Callable[[], Tensor], add_to: Callable[[Tensor], object] | None = None
    ) -> None:
        self.computations.append((weight, compute))


class _LeftToW:
    """One weight gradient that is left to W, recorded when it is first computed."""

    def __init__(self, slot: Slot, number: int, compute: Callable[[], Tensor]) -> None:
        self.number = number
        self._slot, self._compute = slot, compute  # which stays, and with it what it needs: Ws may come in any order
        self._recording: Recording | None = None

    def compute(self, num_outputs: int = 1) -> Tensor:
        if self._recording is None:
            self._recording = self._slot.record(lambda _: (self._compute(),), [], "a weight gradient")
        (gradient,) = self._recording.replay([], num_outputs)
        return gradient  # type: ignore[no-any-return]

    def add_to(self, target: Tensor) -> None:
        target.add_(self.compute(num_outputs=0))


class _Replay(Function):
    @staticmethod
    def forward(ctx: Any, unit: _RecordedUnit, *inputs: Tensor) -> tuple[Tensor, ...]:
        outputs = unit.replay_forward(inputs)
        ctx.unit, ctx.weights, ctx.run = unit, inputs[: unit.num_weights], unit.num_runs
        ctx.mark_non_differentiable(*(out for n, out in enumerate(outputs) if n not in unit.differentiable))
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        unit: _RecordedUnit = ctx.unit
        if unit.num_runs != ctx.run:
            raise RuntimeError(
                "config.cuda_graphs: a stage was called twice for one microbatch, and the second call has overwritten "
                "what the first has kept for its backward: call it once, or unset config.cuda_graphs."
            )
        return None, *unit.replay_backward(ctx.weights, output_grads)


def _copy_of(parameter: nn.Parameter) -> nn.Parameter:
    """A parameter with the same memory, without attributes and hooks."""
    return nn.Parameter(parameter.data, parameter.requires_grad)


def _check_leaves(outputs: Iterable[Tensor], leaves: Iterable[Tensor | None]) -> None:
    """Raises RuntimeError if gradients would go to others, once and never again."""
    known = {id(leaf) for leaf in leaves}
    nodes = [get_gradient_edge(output).node for output in outputs]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, nn.Parameter) and id(variable) not in known:
            raise RuntimeError(
                f"it uses a parameter of shape {list(variable.shape)} that is no attribute of one of its modules"
            )
        for below, _ in node.next_functions:
            if below is not None and below not in seen:
                seen.add(below)
                nodes.append(below)
