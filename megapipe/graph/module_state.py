"""The modules of a stage that runs as graphs, and their parameters and buffers.

Of parameters that `parallelize_module` has shared out among ranks a graph takes this rank's part, and gives that of the
gradient. While a stage is traced they are DTensors, so what DTensors do to their parts, and the collectives between,
are nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..chunks import as_sharded
from ..structure import GraphFacts
from ..weight_grad import autocast_dtype, once_differentiable

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement


class Mode(NamedTuple):
    """A graph is right for one of these, besides the arguments."""

    training: tuple[bool, ...]
    weights: tuple[tuple[Any, torch.Size, torch.dtype, torch.device, bool], ...]
    autocast: torch.dtype | None


class ModuleState:
    """Parameters first, then buffers, each once, tied ones too."""

    def __init__(self, module: nn.Module) -> None:
        self.modules = list(module.modules())
        self._facts = GraphFacts(module)
        weights = {parameter: name for name, parameter in module.named_parameters()}
        self.num_weights = len(weights)
        self.names = [*weights.values(), *(name for name, buffer in module.named_buffers() if buffer not in weights)]
        self._owners = [_owner(module, name) for name in self.names]
        self._structure = self._look()
        self._seen = self._all()

    def tensors(self) -> list[Tensor]:
        """Looked up anew: they may have been replaced."""
        return [tensors[name] for tensors, name in self._owners]

    def mode(self) -> Mode:
        """The one that the stage is in."""
        tensors = self.tensors()
        return Mode(
            tuple([module.training for module in self.modules]),
            tuple([(getattr(t, "placements", type(t)), t.shape, t.dtype, t.device, t.requires_grad) for t in tensors]),
            autocast_dtype(tensors[0].device.type if tensors else "cpu"),
        )

    def name(self, number: int) -> str:
        """The name of one of the tensors, or of the inputs that come after them."""
        return self.names[number] if number < len(self.names) else f"its input {number - len(self.names)}"

    def find_change(self) -> str | None:
        """What has changed since the module was captured that its graphs cannot know; None where nothing has."""
        change = self._facts.find_change(self.modules[0])
        if change is not None:
            return change
        found = self._all()
        if len(found) != len(self._seen) or not all(map(operator.is_, found, self._seen)):
            if self._look() != self._structure:
                return "others of its tensors are one and the same"
            self._seen = found
        return None

    def _all(self) -> list[Any]:
        return [
            tensor
            for module in self.modules
            for tensors in (module._parameters, module._buffers)
            for tensor in tensors.values()
        ]

    def _look(self) -> list[Any]:
        """Which tensors are one and the same."""
        found: dict[int, int] = {}
        return [
            [(name, found.setdefault(id(tensor), len(found))) for name, tensor in tensors.items()]
            for module in self.modules
            for tensors in (module._parameters, module._buffers)
        ]


def _owner(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dict that holds a parameter or buffer, and its key there."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    return owner._parameters if last in owner._parameters else owner._buffers, last


class SharedOut:
    """Which inputs of a stage's graphs are parts of a DTensor, and how their gradients are laid out.

    Args:
        inputs: the stage's tensors.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        found = {number: as_sharded(tensor) for number, tensor in enumerate(inputs)}
        self._likes = {number: _Like(tensor) for number, tensor in found.items() if tensor is not None}

    def parts(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of them, in the same memory."""
        parts = list(inputs)
        for number in self._likes:
            parts[number] = parts[number].detach().to_local()  # type: ignore[attr-defined]
        return parts

    def whole(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """DTensors again, for tracing, differentiable. Their backward notes how the gradients are laid out."""
        tensors = list(parts)
        for number, like in self._likes.items():
            tensors[number] = _Whole.apply(parts[number], like)  # type: ignore[no-untyped-call]
        return tensors

    def gradient(self, number: int, part: Any) -> Any:
        """The gradient of an input, laid out as eager autograd would have it; None for None."""
        like = self._likes.get(number)
        return part if like is None or part is None else like.dtensor(part, like.of_gradient)

    def gradients(self, parts: Sequence[Any]) -> list[Any]:
        """Those of all inputs."""
        return [self.gradient(number, part) for number, part in enumerate(parts)]


class _Like:
    """How a parameter is shared out."""

    def __init__(self, tensor: DTensor) -> None:
        self.mesh, self.placements = tensor.device_mesh, tensor.placements
        self.shape, self.stride = tensor.shape, tensor.stride()
        self.of_gradient = self.placements

    def dtensor(self, part: Tensor, placements: Sequence[Placement]) -> DTensor:
        from torch.distributed.tensor import DTensor

        sizes = {"shape": self.shape, "stride": self.stride}
        return DTensor.from_local(part, self.mesh, placements, run_check=False, **sizes)  # type: ignore[arg-type]


class _Whole(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, like: _Like) -> Tensor:
        ctx.like = like
        return like.dtensor(part, like.placements)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Any) -> tuple[Tensor, None]:
        # A sum yet to be made stays one, to be made once in a step and not for each microbatch.
        of_parameter = ctx.like.placements
        placements = [own if _is_sum(own, like) else like for own, like in zip(grad.placements, of_parameter)]
        ctx.like.of_gradient = placements
        if placements != list(grad.placements):  # torch 2.9 refuses a Partial one that is there already
            grad = grad.redistribute(placements=placements)
        part: Tensor = grad.to_local()
        return part, None


def _is_sum(own: Placement, like: Placement) -> bool:
    return own.is_partial() and like.is_replicate()
