"""A stage that runs as graphs: captured once, then run like any other module.

What a graph would do otherwise than the module is looked for while it is captured, and refused.
"""

from __future__ import annotations

import copy
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..chunks import as_sharded
from ..weight_grad import capturing
from .arguments import Arguments, Structure
from .function import Forward, Graphs, autocast_dtype, offering, run_forward
from .joint import CaptureError, line_in, trace_joint
from .partition import partition
from .recompute import recompute as cut_to_recompute

__all__ = ["CapturedStage", "capture"]

Module = TypeVar("Module", bound=nn.Module)


def capture(
    module: Module,
    example_inputs: Sequence[Any],
    loss_fn: Callable[..., Tensor] | None = None,
    *,
    input_tensor: Any = None,
    recompute: bool = False,
    compile: str | None = None,
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
        recompute: save only what lives where the forward is narrowest, between layers and between attention and MLP,
            and compute the rest again in backward. torch.utils.checkpoint within the stage is taken out.
        compile: "inductor" compiles each graph when it is first run. Random numbers stay the same.

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
    if "forward" in module.__dict__:
        raise ValueError(
            f"{type(module).__name__} has a forward of its own besides its class's: capture cannot replace it."
        )
    if compile not in (None, "inductor"):
        raise ValueError(f'compile must be None or "inductor", got {compile!r}.')
    stage = _Stage(module, tuple(example_inputs), loss_fn, input_tensor, recompute, compile is not None)
    module.__dict__["_megapipe_graphs"] = stage
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
        return run_forward(*stage.prepare(args, kwargs))

    @property
    def forward_segments(self) -> Callable[..., Generator[None, None, Any]] | None:
        """For an overlap with another stage's backward (see `overlap.in_segments`). None if the stage does not
        communicate."""
        stage: _Stage = self.__dict__["_megapipe_graphs"]
        return stage.run_in_windows if stage.communicates else None


def _set_input_tensor(stage: CapturedStage, input_tensor: Any) -> None:
    stage.__dict__["_megapipe_graphs"].input_tensor = input_tensor


_captured_classes: dict[type[nn.Module], type[nn.Module]] = {}


def _captured_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _captured_classes:
        name = f"Captured{original.__name__}"
        members: dict[str, Any] = {"__module__": original.__module__}
        if hasattr(original, "set_input_tensor"):
            members["set_input_tensor"] = _set_input_tensor
        _captured_classes[original] = type(name, (CapturedStage, original), members)
    return _captured_classes[original]


class _Mode(NamedTuple):
    """What a capture depends on besides the arguments."""

    training: tuple[bool, ...]
    weights: tuple[tuple[type[Tensor], torch.Size, torch.dtype, torch.device, bool], ...]
    autocast: torch.dtype | None


class _Stage:
    """A module, and the graphs that were made of it so far."""

    def __init__(
        self,
        module: nn.Module,
        example: tuple[Any, ...],
        loss_fn: Callable[..., Tensor] | None,
        input_tensor: Any,
        recomputes: bool,
        compiles: bool,
    ) -> None:
        self.input_tensor: Any = None
        self._module = module
        self._class = type(module)
        self._what = f"the stage {self._class.__name__}"
        self._loss_fn = loss_fn
        self._cut = cut_to_recompute if recomputes else partition
        self._compiles = compiles
        self._modules = list(module.modules())
        self._numbers = _numbers_of(self._modules)
        weights = {parameter: name for name, parameter in module.named_parameters()}
        named: list[tuple[str, Tensor]] = [(name, weight) for weight, name in weights.items()]
        named += [(name, buffer) for name, buffer in module.named_buffers() if buffer not in weights]
        self._num_weights = len(weights)
        self._names = [name for name, _ in named]
        self._owners = [_owner(module, name) for name in self._names]
        self._structure = self._look()
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

    def __deepcopy__(self, memo: dict[int, Any]) -> _Stage:
        """For a copy of the module. The graphs serve both: they are given their weights."""
        memo[id(self)] = copied = object.__new__(_Stage)
        copied.__dict__.update(copy.deepcopy(self.__dict__ | {"input_tensor": None, "_graphs": {}}, memo))
        copied._graphs.update(self._graphs)
        copied._numbers = _numbers_of(copied._modules)
        return copied

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graphs, list[Tensor]]:
        """The graphs for a call, and their inputs."""
        received = _as_set(self.input_tensor) if self._sets_input else _as_set(None)
        tensors = self._arguments.tensors((received, *self._bind(args, kwargs)))
        return self.graphs(), self._weights_and_buffers() + tensors

    @property
    def communicates(self) -> bool:
        """Told by any of its modes, since the one it is about to be run in may not be entered yet."""
        return any(graphs.communicates for graphs in self._graphs.values())

    def run_in_windows(self, *args: Any, **kwargs: Any) -> Generator[None, None, Any]:
        """Forward, by the graph of a backward with which it is multiplexed, if that comes before the second step."""
        forward = Forward(*self.prepare(args, kwargs))
        with offering(forward):
            yield
        return run_forward(forward.graphs, forward.inputs, forward.results)

    def graphs(self) -> Graphs:
        """For the mode that the module is in."""
        if self._look() != self._structure:
            raise RuntimeError(f"{self._what} has other modules or ties than when it was captured: capture it last.")
        tensors = self._weights_and_buffers()
        mode = _Mode(
            tuple([module.training for module in self._modules]),
            tuple([(type(t), t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            autocast_dtype(tensors),
        )
        if mode not in self._graphs:
            self._graphs[mode] = self._capture(tensors)
        return self._graphs[mode]

    def _weights_and_buffers(self) -> list[Tensor]:
        """Each once, tied ones too. Looked up anew: they may have been replaced."""
        return [tensors[name] for tensors, name in self._owners]

    def _look(self) -> list[Any]:
        """The modules inside, and which of their tensors are the same."""
        found: dict[int, int] = {}
        look: list[Any] = []
        for module in self._modules:
            look += [self._numbers.get(id(child)) for child in module._modules.values()]
            for tensors in (module._parameters, module._buffers):
                look += [(name, found.setdefault(id(tensor), len(found))) for name, tensor in tensors.items()]
        return look

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
        shard = next((name for name, tensor in zip(self._names, tensors) if as_sharded(tensor) is not None), None)
        if shard is not None:
            raise CaptureError(
                f"{self._what} is to run as graphs, but its {shard} is a shard: nobody gathers the parameters of the "
                "modules within, which are not called. Capture it first, and then call fully_shard on the stage only."
            )
        outputs: list[Structure] = []

        def function(*flat: Tensor) -> tuple[Tensor, ...]:
            state = {f"module.{name}": tensor for name, tensor in zip(self._names, flat)}
            value = self._arguments.structure.fill(flat[len(self._names) :])
            output = torch.func.functional_call(_Holder(self._module, self._call), state, (value,))
            structure, flat_output = Structure.of(output)
            opaque = next((leaf for leaf in structure.fixed.values() if Structure.of(_attributes(leaf))[1]), None)
            if opaque is not None:
                raise CaptureError(
                    f"{self._what} cannot be captured: it returns a {type(opaque).__name__} with tensors in it, which "
                    "torch's pytrees do not know: return a dict, list or tuple, or leave this stage eager."
                )
            outputs.append(structure)
            return tuple(flat_output)

        with ExitStack() as around:
            around.enter_context(torch.inference_mode(False))
            examples = [
                tensor.detach().requires_grad_(tensor.requires_grad) for tensor in Structure.of(self._example)[1]
            ]
            around.enter_context(capturing())
            around.enter_context(torch.enable_grad())
            joint = trace_joint(function, [*tensors, *examples], self._what)
        changed = [n for n in joint.mutated if not len(self._names) > n >= self._num_weights]
        if changed:
            raise CaptureError(
                f"{self._what} cannot be captured: it changes {self._name(changed[0])} in place. Only buffers may "
                "be changed."
            )
        return Graphs(self._cut(joint), self._num_weights, outputs[-1], self._what if self._compiles else None)

    def _name(self, number: int) -> str:
        return self._names[number] if number < len(self._names) else f"its input {number - len(self._names)}"

    def _call(self, value: Any) -> Any:
        """The module itself, on `value`: what the stage before returned, arguments, and the target of the loss."""
        received, args, kwargs, target = value
        before = [(dict(module.__dict__), _containers(module)) for module in self._modules]
        captured_class = type(self._module)
        self._module.__class__ = self._class  # its methods may call each other
        try:
            if self._sets_input:
                self._module.set_input_tensor(received)  # type: ignore[operator]
            taken = [(_tensors_kept(module), dict(module._buffers)) for module in self._modules]
            with _without_drawing(self._what), _setting_no_random_state(self._what), _SettingNoData(self._what):
                output = self._module.forward(*args, **kwargs)
            self._check_attributes(taken)
        finally:
            self._module.__class__ = captured_class
            for module, (attributes, containers) in zip(self._modules, before):
                for name in set(module.__dict__) - set(attributes):
                    del module.__dict__[name]
                module.__dict__.update(attributes)
                for container, content in containers:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(content)
        return output if self._loss_fn is None else self._loss_fn(output, target)

    def _check_attributes(self, before: list[tuple[dict[str, list[Tensor]], dict[str, Any]]]) -> None:
        for module, (kept, buffers) in zip(self._modules, before):
            for name, tensors in _tensors_kept(module).items():
                if list(map(id, tensors)) != list(map(id, kept.get(name, []))):
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


def _numbers_of(modules: Sequence[nn.Module]) -> dict[int, int]:
    """By the id of each."""
    return {id(module): number for number, module in enumerate(modules)}


class _Holder(nn.Module):
    """For `functional_call`, which puts tensors in the place of a module's own while it calls it."""

    def __init__(self, module: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, value: Any) -> Any:
        return self._call(value)


@contextmanager
def _without_drawing(what: str) -> Iterator[None]:
    """Raises CaptureError where random numbers of Python or NumPy are drawn, and puts these back."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), None if numpy is None else numpy.random.get_state()
    yield
    drawn = ["Python"] if random.getstate() != python_state else []
    if numpy is not None and numpy_state is not None:
        keys, *rest = numpy.random.get_state()[1:]
        drawn += ["NumPy"] if rest != [*numpy_state[2:]] or (keys != numpy_state[1]).any() else []
        numpy.random.set_state(numpy_state)
    random.setstate(python_state)
    if drawn:
        raise CaptureError(
            f"{what} cannot be captured: its forward draws random numbers of {' and '.join(drawn)}, which would be the "
            "same in every call of a graph. Draw them with torch, pass them in, or leave this stage eager."
        )


@contextmanager
def _setting_no_random_state(what: str) -> Iterator[None]:
    """Raises CaptureError where a generator of torch's is given another seed or state, by whatever name."""

    def look(frame: FrameType, event: str, called: Any) -> None:
        if event != "c_call" or not isinstance(getattr(called, "__self__", None), torch.Generator):
            return
        if called.__name__ in ("manual_seed", "seed", "set_state", "graphsafe_set_state", "set_offset"):
            raise CaptureError(
                f"{what} cannot be captured: at {line_in(traceback.extract_stack(frame))} it sets the seed or the "
                "state of the random numbers, which a graph would not do. Set them before the stage is called, or "
                "leave this stage eager."
            )

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(before)


class _SettingNoData(TorchFunctionMode):
    """Raises CaptureError where `.data` of a tensor is replaced, which the tracer does not see."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == _SET_DATA:
            raise CaptureError(
                f"{self._what} cannot be captured: at {line_in(traceback.extract_stack())} it replaces the .data of a "
                "tensor, which a graph would not do. Change a buffer in place (copy_), or leave this stage eager."
            )
        return function(*args, **(kwargs or {}))


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


def _attributes(value: Any) -> Any:
    return getattr(value, "__dict__", None)


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


def _tensors_kept(module: nn.Module) -> dict[str, list[Tensor]]:
    """What a module refers to as attributes, in lists and dicts too."""
    return {name: Structure.of(value)[1] for name, value in vars(module).items() if name not in vars(_PLAIN)}


def _containers(module: nn.Module) -> list[tuple[Any, Any]]:
    """Its lists, dicts and sets, with what is in them."""
    values = [value for name, value in vars(module).items() if name not in vars(_PLAIN)]
    return [(value, type(value)(value)) for value in values if type(value) in (list, dict, set)]


_PLAIN = nn.Module()
