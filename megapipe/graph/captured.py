"""A stage that runs as graphs: captured once, then run like any other module.

It is one autograd Function. In a backward that a schedule has split, it computes what B is for, keeps what the weight
gradients need, and puts these off like a layer of `weight_grad` does; so the verbs know nothing of graphs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from ..weight_grad.putting_off import Kept, capturing, defer, is_putting_off, keep
from .arguments import Arguments, Structure, laid_out
from .joint import CaptureError, trace_joint
from .nodes import storage_of
from .partition import Partition, partition
from .split import SplitBackward, split_di_dw

__all__ = ["CapturedStage", "Graphs", "capture"]

Module = TypeVar("Module", bound=nn.Module)


def capture(
    module: Module,
    example_inputs: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    input_tensor: Any = None,
) -> Module:
    """Make a stage run as graphs: forward, backward, input gradients alone, and weight gradients by themselves.

    Returns `module`, which keeps its parameters, names and hooks, and whatever else it has; its class is swapped for
    one derived from it. It is captured again when it is first run in another way: in eval mode, under another autocast,
    with other weights frozen. Run it under the autocast that it is to be run with.

    Args:
        example_inputs: what `forward` is called with. Tensors count by their shape, dtype, device and whether they
            require a gradient, and may be on the device of the weights only; all other values become part of the graph.
        loss_fn: where given, the stage returns `loss_fn(output, last)` for the last of its inputs, which `forward` does
            not see.
        input_tensor: what `set_input_tensor` is called with, where the stage has it: the tensor itself, [sequence,
            batch, hidden], or the container of tensors that the stage before returns. A tensor of floating point gets
            a gradient. None on the first stage.

    Raises CaptureError (a ValueError) where the stage cannot be a graph, with the line; RuntimeError on torch before
    2.9. The module is then as it was.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"capture takes a module, but got a {type(module).__name__}.")
    if isinstance(module, CapturedStage):
        raise ValueError(f"{type(module).__name__} is captured already: capture each stage once.")
    if not isinstance(example_inputs, (tuple, list)):
        raise TypeError(
            f"example_inputs must be a tuple of what forward is called with, but it is a "
            f"{type(example_inputs).__name__}: write (x,) for one tensor."
        )
    module.__dict__["_megapipe_graphs"] = stage = _Stage(module, tuple(example_inputs), loss_fn, input_tensor)
    try:
        stage.graphs()
    except BaseException:
        del module.__dict__["_megapipe_graphs"]
        raise
    module.__class__ = _captured_class(type(module))  # type: ignore[assignment]
    return module


class CapturedStage(nn.Module):
    """What `capture` makes of a module, besides its own class."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: _Stage = self.__dict__["_megapipe_graphs"]
        return stage.run(*stage.prepare(args, kwargs))

    def set_input_tensor(self, input_tensor: Any) -> None:
        self.__dict__["_megapipe_graphs"].input_tensor = input_tensor


_captured_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _captured_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _captured_classes:
        name = f"Captured{original.__name__}"
        _captured_classes[original] = type(name, (CapturedStage, original), {"__module__": original.__module__})
    return _captured_classes[original]


class Graphs:
    """The graphs of a stage in one mode, and what it takes to run them."""

    def __init__(self, parts: Partition, num_weights: int, output: Structure) -> None:
        self.parts = parts
        self.output = output
        self.num_weights = num_weights
        self.forward = parts.forward.forward
        self.forward_only = parts.forward_only.forward
        self.backward = parts.backward.forward
        placeholders = parts.backward.graph.find_nodes(op="placeholder")
        num_tangents = len(parts.differentiable)
        self.tangent_strides = [node.meta["val"].stride() for node in placeholders[len(placeholders) - num_tangents :]]
        self.num_saved = len(placeholders) - num_tangents - len(parts.read)
        self.is_watched = _share_memory_with_others(parts.forward, parts.num_outputs, self.num_saved)
        self.first_tangent = len(placeholders) - num_tangents

    @cached_property
    def split(self) -> SplitBackward:
        return split_di_dw(self.parts.backward, range(self.num_weights))

    @cached_property
    def input_gradients(self) -> Callable[[list[Tensor]], tuple[Tensor | None, ...]]:
        return self.split.input_gradients.forward


def _share_memory_with_others(forward: GraphModule, num_outputs: int, num_saved: int) -> list[bool]:
    """Of each saved value, whether someone else may change it: it shares memory with an input or an output."""
    (end,) = forward.graph.find_nodes(op="output")
    values = end.args[0]
    others = {storage_of(node) for node in values[:num_outputs]} | set(forward.graph.find_nodes(op="placeholder"))
    return [storage_of(node) in others for node in values[len(values) - num_saved :]]


class _Mode(NamedTuple):
    """What a capture depends on besides the arguments."""

    training: tuple[bool, ...]
    weights: tuple[tuple[torch.dtype, torch.device, bool], ...]
    autocast: torch.dtype | None


class _Stage:
    """A module, and the graphs that were made of it so far."""

    def __init__(
        self, module: nn.Module, example: tuple[Any, ...], loss_fn: Callable[..., Tensor] | None, input_tensor: Any
    ) -> None:
        self.input_tensor: Any = None
        self._module = module
        self._class = type(module)
        self._what = f"the stage {self._class.__name__}"
        self._loss_fn = loss_fn
        self._modules = list(module.modules())
        named = [*module.named_parameters(), *module.named_buffers()]
        self._num_weights = len(list(module.parameters()))
        self._names = [name for name, _ in named]
        self._owners = [_owner(module, name) for name in self._names]
        self._sets_input = hasattr(module, "set_input_tensor")
        self._signature = inspect.signature(self._class.forward)
        if input_tensor is not None and not self._sets_input:
            raise ValueError(f"input_tensor was given, but {self._what} has no set_input_tensor: give it as an input.")
        leaves = Structure.of(input_tensor)[1]
        if any(leaf.is_floating_point() for leaf in leaves):
            input_tensor = _with_gradients(input_tensor)
        self._example = (_as_set(input_tensor), *self._bind(example, {}))
        self._arguments = Arguments(self._example, self._what)
        self._graphs: dict[_Mode, Graphs] = {}

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graphs, list[Tensor]]:
        """The graphs for a call, and their inputs."""
        received = _as_set(self.input_tensor) if self._sets_input else _as_set(None)
        tensors = self._arguments.tensors((received, *self._bind(args, kwargs)))
        return self.graphs(), self._weights_and_buffers() + tensors

    def run(self, graphs: Graphs, inputs: list[Tensor], results: Sequence[Tensor] | None = None) -> Any:
        """Forward. `results`: what the forward graph has returned, where it was run already."""
        if torch.is_grad_enabled():
            outputs = _Run.apply(graphs, results, *inputs)  # type: ignore[no-untyped-call]
        else:
            parts = graphs.parts
            with _as_captured(inputs):
                values = graphs.forward_only(list(inputs)) if results is None else results
            outputs = values[: parts.num_outputs]
            _overwrite(inputs, parts.mutated, values[parts.num_outputs :])
        return graphs.output.fill(outputs)

    def graphs(self) -> Graphs:
        """For the mode that the module is in."""
        tensors = self._weights_and_buffers()
        mode = _Mode(
            tuple([module.training for module in self._modules]),
            tuple([(tensor.dtype, tensor.device, tensor.requires_grad) for tensor in tensors]),
            _autocast(tensors),
        )
        if mode not in self._graphs:
            self._graphs[mode] = self._capture(tensors)
        return self._graphs[mode]

    def _weights_and_buffers(self) -> list[Tensor]:
        """Each once, tied ones too. Looked up anew: they may have been replaced."""
        return [tensors[name] for tensors, name in self._owners]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """However arguments are passed, by position, keyword or default: the same. And what the loss takes."""
        target = None
        if self._loss_fn is not None:
            if not args:
                raise TypeError(
                    f"{self._what} was captured with a loss_fn: its last positional argument is the target."
                )
            *args, target = args  # type: ignore[assignment]
        bound = self._signature.bind(self._module, *args, **kwargs)
        bound.apply_defaults()
        return bound.args[1:], bound.kwargs, target

    def _capture(self, tensors: list[Tensor]) -> Graphs:
        outputs: list[Structure] = []

        def function(*flat: Tensor) -> tuple[Tensor, ...]:
            state = {f"module.{name}": tensor for name, tensor in zip(self._names, flat)}
            value = self._arguments.structure.fill(flat[len(self._names) :])
            output = torch.func.functional_call(_Holder(self._module, self._call), state, (value,))
            structure, flat_output = Structure.of(output)
            outputs.append(structure)
            return tuple(flat_output)

        examples = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in Structure.of(self._example)[1]]
        with ExitStack() as around:
            around.enter_context(capturing())
            around.enter_context(torch.enable_grad())
            around.enter_context(torch.random.fork_rng())
            joint = trace_joint(function, [*tensors, *examples], self._what)
        changed = [n for n in joint.mutated if not len(self._names) > n >= self._num_weights]
        if changed:
            raise CaptureError(
                f"{self._what} cannot be captured: it changes {self._name(changed[0])} in place. Only buffers may "
                "be changed."
            )
        return Graphs(partition(joint), self._num_weights, outputs[-1])

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else f"its input {number - len(self._names)}"

    def _call(self, value: Any) -> Any:
        """The module itself, on `value`: what the stage before returned, arguments, and the target of the loss."""
        received, args, kwargs, target = value
        before = [dict(module.__dict__) for module in self._modules]
        try:
            if self._sets_input:
                self._class.set_input_tensor(self._module, received)  # type: ignore[attr-defined]
            taken = [(dict(module.__dict__), dict(module._buffers)) for module in self._modules]
            torch.manual_seed(_SEED)
            output = self._class.forward(self._module, *args, **kwargs)
            if torch.initial_seed() != _SEED:
                raise CaptureError(
                    f"{self._what} cannot be captured: its forward sets the seed of the random numbers, which a graph "
                    "would not do. Set it before the stage is called, or leave this stage eager."
                )
            self._check_attributes(taken)
        finally:
            for module, attributes in zip(self._modules, before):
                for name in set(module.__dict__) - set(attributes):
                    del module.__dict__[name]
                module.__dict__.update(attributes)
        return output if self._loss_fn is None else self._loss_fn(output, target)

    def _check_attributes(self, before: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        for module, (attributes, buffers) in zip(self._modules, before):
            for name, value in module.__dict__.items():
                if value is not attributes.get(name) and name != "_buffers" and Structure.of(value)[1]:
                    raise CaptureError(
                        f"{self._what} cannot be captured: its forward keeps a tensor as {type(module).__name__}.{name}"
                        ", which a graph would not set. Return it, change a buffer in place, or leave this stage eager."
                    )
            for name, buffer in module._buffers.items():
                if buffer is not buffers.get(name):
                    raise CaptureError(
                        f"{self._what} cannot be captured: its forward replaces the buffer {name} of "
                        f"{type(module).__name__}, which a graph would not do. Change it in place (copy_)."
                    )


class _Holder(nn.Module):
    """For `functional_call`, which puts tensors in the place of a module's own while it calls it."""

    def __init__(self, module: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, value: Any) -> Any:
        return self._call(value)


_SEED = 4_294_967_311  # nobody else's


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a parameter or buffer, and its key there."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters if last in owner._parameters else owner._buffers, last


def _as_set(input_tensor: Any) -> Any:
    """What models are given: a list, also for one tensor or none."""
    return [input_tensor] if input_tensor is None or isinstance(input_tensor, Tensor) else input_tensor


def _with_gradients(value: Any) -> Any:
    structure, tensors = Structure.of(value)
    return structure.fill([t.detach().requires_grad_(t.is_floating_point()) for t in tensors])


def _autocast(tensors: Sequence[Tensor]) -> torch.dtype | None:
    device_type = tensors[0].device.type if tensors else "cpu"
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _as_captured(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """The casts of autocast are in the graph already."""
    if _autocast(tensors) is None:
        return nullcontext()
    return torch.autocast(tensors[0].device.type, enabled=False)


def _overwrite(inputs: Sequence[Tensor], numbers: Sequence[int], values: Sequence[Tensor]) -> None:
    for number, value in zip(numbers, values):
        inputs[number].copy_(value)


class _Run(Function):
    @staticmethod
    def forward(ctx: Any, graphs: Graphs, results: Sequence[Tensor] | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        parts = graphs.parts
        if results is None:
            with _as_captured(inputs):
                results = graphs.forward(list(inputs))
        first_saved = parts.num_outputs + len(parts.mutated)
        # Detached: autograd refuses to change a view made in here in place.
        outputs = [value.detach() for value in results[: parts.num_outputs]]
        saved = results[first_saved:]
        _overwrite(inputs, parts.mutated, results[parts.num_outputs : first_saved])
        # Autograd sees to it that nobody changes those. Nobody can change the others, which are freed as backward runs.
        watched = [value for value, is_watched in zip(saved, graphs.is_watched) if is_watched]
        ctx.save_for_backward(*(inputs[n] for n in parts.read), *watched)
        ctx.saved = [None if is_watched else value for value, is_watched in zip(saved, graphs.is_watched)]
        ctx.graphs, ctx.weights = graphs, inputs[: graphs.num_weights]
        ctx.mark_non_differentiable(*(out for n, out in enumerate(outputs) if n not in parts.differentiable))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_grads: Tensor) -> tuple[Tensor | None, ...]:
        graphs: Graphs = ctx.graphs
        arguments = _arguments_of_backward(ctx, output_grads)
        del output_grads
        if is_putting_off():
            grads = _put_off(graphs, ctx.weights, arguments)
        else:
            with _as_captured(arguments):
                grads = graphs.backward(arguments)
        return None, None, *grads


def _arguments_of_backward(ctx: Any, output_grads: Sequence[Tensor]) -> list[Tensor]:
    graphs: Graphs = ctx.graphs
    if ctx.saved is None:
        raise RuntimeError(
            "the backward of a captured stage was run a second time, but what it needs was freed in the first: run the "
            "forward again."
        )
    again = ctx.saved_tensors
    num_read = len(graphs.parts.read)
    watched = iter(again[num_read:])
    saved = [next(watched) if value is None else value for value in ctx.saved]
    ctx.saved = None
    grads = [output_grads[n] for n in graphs.parts.differentiable]
    return [*again[:num_read], *saved, *(laid_out(grad, s) for grad, s in zip(grads, graphs.tangent_strides))]


def _put_off(graphs: Graphs, weights: Sequence[Tensor], arguments: list[Tensor]) -> list[Tensor | None]:
    """B. What it leaves to W is handed to `defer`, one weight at a time."""
    split = graphs.split
    held: dict[int, Tensor | Kept] = {n: arguments[n] for n in split.held}
    first_kept = len(arguments)
    held.update((n, keep(arguments[n])) for n in split.held if n >= graphs.first_tangent)
    with _as_captured(arguments):
        results = graphs.input_gradients(arguments)
    grads = list(results[: split.num_outputs])
    kept = cast(Sequence[Tensor], results[split.num_outputs :])
    held.update((n, keep(value)) for n, value in enumerate(kept, first_kept))
    for weight_gradient in split.weights:
        weight = weights[weight_gradient.output]
        compute = partial(_weight_gradient, weight_gradient.graph.forward, [held[n] for n in weight_gradient.takes])
        if weight._backward_hooks:  # these see a gradient before it is added
            grads[weight_gradient.output] = compute()
        else:
            defer(weight, compute, partial(_add, compute))
    return grads


def _weight_gradient(graph: Callable[[list[Tensor]], tuple[Tensor]], held: list[Tensor | Kept]) -> Tensor:
    tensors = [value.tensor if isinstance(value, Kept) else value for value in held]
    with _as_captured(tensors):
        (gradient,) = graph(tensors)
    return gradient


def _add(compute: Callable[[], Tensor], target: Tensor) -> None:
    target.add_(compute())
