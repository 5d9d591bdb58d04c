"""Stages of torch.distributed.pipelining as chunks: what they are called with, and DTensors between them."""

from __future__ import annotations

import functools
import operator
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import tensor as dtensor
from torch.utils._pytree import tree_map_only

from ...config import PipelineConfig
from ...plan import StageInfo
from ...stages import PipelineStage


class Chunk(PipelineStage):
    """The module of one of torch's stages. Its positional arguments are what the stage before returned."""

    def __init__(self, stage: Any, config: PipelineConfig) -> None:
        super().__init__(stage.submod, StageInfo(stage.stage_index, stage.num_stages), config)
        self.stage = stage

    def set_input_tensor(self, received: Any) -> None:
        super().set_input_tensor(received)
        if self._received and type(self._received[0]) in (tuple, list):
            self._received = tuple(self._received[0])
        if self._received and self._positions is not None:
            self._received = tuple(self._received[position] for position in self._positions)
        self._received = tuple(one.restored(self.stage) if type(one) is Sharded else one for one in self._received)

    @functools.cached_property
    def _positions(self) -> list[int] | None:
        return positions_of(self.stage)

    def forward(self, *batch: Any, **options: Any) -> Any:
        output = super().forward(*batch, **options)
        return output if self.info.is_last else tree_map_only(dtensor.DTensor, Sharded.of, output)


def positions_of(stage: Any) -> list[int] | None:
    """The positions, in what the stage before returns, of the arguments of a traced stage. None for others, which take
    all in order.

    Raises:
        NotImplementedError: an argument comes from a stage further before.
    """
    if stage.is_first or not hasattr(stage, "node"):
        return None
    positions = []
    for argument in stage.node.args:
        source, position = argument.args if argument.target is operator.getitem else (argument, 0)
        if source.op == "placeholder":  # an argument of the whole model, which torch's stages are given by keyword
            continue
        if (index := stage.submod_to_stage_index[source.name]) != stage.stage_index - 1:
            raise NotImplementedError(
                f"stage {stage.stage_index} takes an output of stage {index}: megapipe sends outputs to the next stage "
                "only, so let the stages between return it too, or cut elsewhere."
            )
        positions.append(position)
    return positions


class Sharded(NamedTuple):
    """A DTensor on its way to another stage, whose mesh has the same names."""

    local: Tensor
    mesh: tuple[str, ...]
    placements: tuple[tuple[str, int | str | None], ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Sharded:
        """Raises TypeError for placements that other ranks cannot be told."""
        placements = []
        for one in tensor.placements:
            if type(one).__name__ not in _PLACEMENTS:
                raise TypeError(f"a DTensor between stages has the placement {one!r}: redistribute it before.")
            placements.append((type(one).__name__, getattr(one, _PLACEMENTS[type(one).__name__], None)))
        names = tuple(tensor.device_mesh.mesh_dim_names or ())
        return cls(tensor.to_local(), names, tuple(placements), tuple(tensor.shape), tuple(tensor.stride()))

    def restored(self, stage: Any) -> Any:
        """The DTensor, on the stage's own mesh: as torch finds it, by `get_mesh`, or among the static arguments."""
        meshes = stage._mesh_cache
        mesh = next((mesh for (names, _), mesh in meshes._cache.items() if names == self.mesh), None)
        return dtensor.DTensor.from_local(
            self.local,
            mesh or meshes.get_mesh((self.mesh, None)),
            [getattr(dtensor, kind)(*(() if value is None else (value,))) for kind, value in self.placements],
            shape=self.shape,  # type: ignore[arg-type]
            stride=self.stride,
        )


_PLACEMENTS = {"Shard": "dim", "Replicate": "", "Partial": "reduce_op"}
