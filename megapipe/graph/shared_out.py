"""Parameters that `parallelize_module` has shared out among ranks: a graph takes this rank's part of each, and gives
that of its gradient.

While a stage is traced they are DTensors, so what DTensors do to their parts, and the collectives between, are nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ..chunks import as_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

__all__ = ["SharedOut"]


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
        part: Tensor = grad.redistribute(placements=placements).to_local()
        return part, None


def _is_sum(own: Placement, like: Placement) -> bool:
    return own.is_partial() and like.is_replicate()
