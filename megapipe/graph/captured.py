"""A stage that runs as graphs: captured once, then run like any other module.

A module whose graph would do something else than the module itself is refused when it is captured.
"""

from __future__ import annotations

import copy
import inspect
import logging
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..activations import restores_of, undoing_changes
from ..chunks import as_sharded
from .autograd_function import Graphs, OfferedForward, offering, run_forward
from .captured_arguments import Arguments, TensorTree
from .errors import CaptureError
from .joint_graph import trace_joint
from .module_state import Mode, ModuleState, SharedOut
from .partitioning import partition
from .partitioning import recompute as cut_to_recompute
from .side_effects import refusing_side_effects

logger = logging.getLogger(__name__)

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

    The class of `module` is swapped for one derived from it; its parameters, names, hooks and all else stay. It is
    captured again when it is first run in another mode: in eval mode, under another autocast, with other weights
    frozen. Capture it under the autocast that it is run with.

    Args:
        example_inputs: the arguments of `forward`. Tensors count by their shape, dtype, device and whether they require
            a gradient, and may be on the device of the weights only; all other values become part of the graph.
        loss_fn: if given, the stage returns `loss_fn(output, last)` for the last of its inputs, which `forward` does
            not see.
        input_tensor: the argument of `set_input_tensor`, if the stage has that: the tensor itself, [sequence, batch,
            hidden], or the container of tensors that the stage before returns. A tensor of floating point gets a
            gradient. None on the first stage.
        recompute: save only the values alive where the forward is narrowest, between layers and between attention and
            MLP, and compute the rest again in backward. torch.utils.checkpoint within the stage is taken out.
        compile: "inductor" compiles each graph when it is first run. Random numbers stay the same.

    Returns:
        `module`.

    Raises:
        CaptureError: the stage cannot be a graph. A ValueError that names the line. The module is as it was.
        TypeError, ValueError: an argument is wrong, or the module is captured already.
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
    stage = _StageGraphs(module, tuple(example_inputs), loss_fn, input_tensor, recompute, compile is not None)
    module.__dict__["_megapipe_graphs"] = stage
    try:
        stage.graphs()
    except BaseException:
        del module.__dict__["_megapipe_graphs"]
        raise
    logger.info("captured %s as graphs", type(module).__name__)
    module.__class__ = _captured_class(type(module))  # type: ignore[assignment]
    return module


class CapturedStage(nn.Module):
    """What `capture` makes of a module, besides its own class."""

    hands_on_state = False
    """Whether a slice of a sequence leaves anything to the next: a graph keeps its outputs only."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        stage: _StageGraphs = self.__dict__["_megapipe_graphs"]
        return run_forward(*stage.prepare(args, kwargs))

    def find_change(self) -> str | None:
        """What has changed since the capture that the graphs cannot know. Steps ask before they begin."""
        stage: _StageGraphs = self.__dict__["_megapipe_graphs"]
        return stage.find_change()

    @property
    def forward_segments(self) -> Callable[..., Generator[None, None, Any]] | None:
        """The forward for an overlap with another stage's backward (see `overlap.in_segments`). None if the stage does
        not communicate."""
        stage: _StageGraphs = self.__dict__["_megapipe_graphs"]
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


class _StageGraphs:
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
        self._state = ModuleState(module)
        self._refuse_lazy()
        self._sets_input = hasattr(module, "set_input_tensor")
        self._signature = inspect.signature(self._class.forward)
        if input_tensor is not None and not self._sets_input:
            raise ValueError(f"input_tensor was given, but {self._what} has no set_input_tensor: give it as an input.")
        input_tensor = tree_map(_with_gradient, input_tensor)
        self._example = tree_map(_dense, (_as_set(input_tensor), *self._bind(example, {})))
        self._arguments = Arguments(self._example, self._what)
        self._graphs: dict[Mode, Graphs] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _StageGraphs:
        """State for a copy of the module. The graphs serve both: they are given their weights."""
        memo[id(self)] = copied = object.__new__(_StageGraphs)
        without: dict[str, Any] = {"input_tensor": None, "_graphs": {}}
        copied.__dict__.update(copy.deepcopy(self.__dict__ | without, memo))
        copied._graphs.update(self._graphs)
        return copied

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Graphs, list[Tensor]]:
        """The graphs for a call, and their inputs."""
        received = _as_set(self.input_tensor) if self._sets_input else _as_set(None)
        tensors = self._arguments.tensors((received, *self._bind(args, kwargs)))
        return self.graphs(), self._state.tensors() + tensors

    def find_change(self) -> str | None:
        """See `structure.GraphFacts`. A whole sentence."""
        change = self._state.find_change()
        if change is None:
            return None
        return (
            f"{self._what} was captured, and its graphs do not know that {change}: put that back, or make the stage "
            "anew and capture it as it is to be."
        )

    @property
    def communicates(self) -> bool:
        """Any of its modes will do, since the one of the next call may not be entered yet."""
        return any(graphs.communicates for graphs in self._graphs.values())

    def run_in_windows(self, *args: Any, **kwargs: Any) -> Generator[None, None, Any]:
        """Forward, by the graph of a backward with which it is multiplexed, if that comes before the second segment."""
        forward = OfferedForward(*self.prepare(args, kwargs))
        with offering(forward):
            yield
        return run_forward(forward.graphs, forward.inputs, results=forward.results)

    def graphs(self) -> Graphs:
        """The graphs for the mode that the module is in."""
        if (change := self.find_change()) is not None:
            raise ValueError(change)
        mode = self._state.mode()
        if mode not in self._graphs:
            self._graphs[mode] = self._capture(self._state.tensors())
        return self._graphs[mode]

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Positional arguments and keywords of `forward`, with its defaults, and the argument of the loss."""
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
        state = self._state
        self._refuse_shards(tensors)
        outputs: list[TensorTree] = []
        shared_out = SharedOut(tensors)

        def function(*flat: Tensor) -> tuple[Tensor, ...]:
            named = {f"module.{name}": tensor for name, tensor in zip(state.names, shared_out.whole(flat))}
            value = self._arguments.structure.fill(flat[len(state.names) :])
            output = torch.func.functional_call(_Holder(self._module, self._call), named, (value,))
            structure, flat_output = TensorTree.of(output)
            self._check_output(structure, flat_output)
            outputs.append(structure)
            return tuple(flat_output)

        with ExitStack() as around:
            around.enter_context(torch.inference_mode(False))
            mkldnn = torch.backends.mkldnn  # its LSTM keeps a workspace at times only
            around.callback(setattr, mkldnn, "enabled", mkldnn.enabled)
            mkldnn.enabled = False  # type: ignore[assignment]
            for restore in restores_of(torch.device("cpu"), [self._module]):  # for tensors that are not registered
                around.callback(restore)
            examples = [
                tensor.detach().requires_grad_(tensor.requires_grad) for tensor in TensorTree.of(self._example)[1]
            ]
            around.enter_context(torch.enable_grad())
            parts_of = [
                part.requires_grad_(tensor.requires_grad) if part is not tensor else tensor
                for part, tensor in zip(shared_out.parts(tensors), tensors)
            ]
            joint = trace_joint(function, [*parts_of, *examples], self._what)
        changed = [n for n in joint.mutated if not len(state.names) > n >= state.num_weights]
        if changed:
            raise CaptureError(
                f"{self._what} cannot be captured: it changes {state.name(changed[0])} in place. Only buffers may "
                "be changed."
            )
        parts = self._cut(joint, state.num_weights)
        return Graphs(parts, state.num_weights, outputs[-1], shared_out, self._what if self._compiles else None)

    def _refuse_lazy(self) -> None:
        for name, tensor in zip(self._state.names, self._state.tensors()):
            if nn.parameter.is_lazy(tensor):
                raise CaptureError(
                    f"{self._what} cannot be captured: {name} has no shape yet (torch's lazy modules): run the module "
                    "once before, on an input like the example."
                )

    def _refuse_shards(self, tensors: list[Tensor]) -> None:
        names = self._state.names
        fsdp = sys.modules.get("torch.distributed.fsdp")
        if fsdp is None or not any(isinstance(module, fsdp.FSDPModule) for module in self._state.modules):
            return
        shard = next((name for name, tensor in zip(names, tensors) if as_sharded(tensor) is not None), None)
        if shard is not None:
            raise CaptureError(
                f"{self._what} is to run as graphs, but its {shard} is a shard: nothing gathers the parameters of the "
                "modules within, which are not called. Capture it first, and then call fully_shard on the stage only."
            )

    def _call(self, value: Any) -> Any:
        """The module itself, on `value`: the input from the stage before, arguments, and the target of the loss."""
        received, args, kwargs, target = value
        captured_class = type(self._module)
        self._module.__class__ = self._class  # its methods may call each other
        try:
            with undoing_changes(self._state.modules) as changed:
                if self._sets_input:
                    self._module.set_input_tensor(received)  # type: ignore[operator]
                with refusing_side_effects(self._state.modules, self._what, changed):
                    output = self._class.forward(self._module, *args, **kwargs)  # that of the instance may be replaced
        finally:
            self._module.__class__ = captured_class
        return output if self._loss_fn is None else self._loss_fn(output, target)

    def _check_output(self, output: TensorTree, tensors: Sequence[Tensor]) -> None:
        if any(as_sharded(tensor) is not None for tensor in tensors):
            raise CaptureError(
                f"{self._what} cannot be captured: it returns a DTensor, and stages hand over plain tensors: return "
                "its to_local(), or let its last layer do so (use_local_output)."
            )
        opaque = output.find_opaque()
        if opaque is not None:
            raise CaptureError(
                f"{self._what} cannot be captured: it returns a {type(opaque).__name__} with tensors in it, which "
                "torch's pytrees do not know: return a dict, list or tuple, or leave this stage eager."
            )


class _Holder(nn.Module):
    """A module for `functional_call`, which puts tensors in the place of a module's own while it calls it."""

    def __init__(self, module: nn.Module, call: Callable[[Any], Any]) -> None:
        super().__init__()
        self.module = module
        self._call = call

    def forward(self, value: Any) -> Any:
        return self._call(value)


def _dense(one: Any) -> Any:
    """What was expanded, in memory of its own, as later arguments may be."""
    return one.contiguous() if isinstance(one, Tensor) and 0 in one.stride() and one.numel() else one


def _as_set(input_tensor: Any) -> Any:
    """The input as models are given it: a list, also for one tensor or none."""
    return [input_tensor] if input_tensor is None or isinstance(input_tensor, Tensor) else input_tensor


def _with_gradient(one: Any) -> Any:
    return one.detach().requires_grad_(one.is_floating_point()) if isinstance(one, Tensor) else one
