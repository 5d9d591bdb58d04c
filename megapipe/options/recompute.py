"""`config.recompute`: activations are computed again before their backward, by an action of its own (R)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

from torch import nn

from ..activations import recomputing, regions_of
from ..plan import RECOMPUTE, Action, StageInfo
from ..stages import Call, Extension, Run, Stage, Unit

__all__ = ["Recompute"]

_compared: WeakSet[nn.Module] = WeakSet()
"""Chunks for which a replay has been compared with its forward."""


class Recompute(Extension):
    """The F of a unit that has an R keeps nothing, and the R makes what any other F keeps. The first R of each chunk is
    compared with its F, to the last bit."""

    compares = True

    def takes_part(self, call: Call) -> bool:
        if call.forward_only:
            return False
        self._forwards = self.plan().recomputed[self.pp_rank]
        self._regions = {info: self._regions_of(model, info) for model, info in zip(call.models, call.stages)}
        self._first: dict[StageInfo, int] = {}
        return bool(self._forwards)

    def _regions_of(self, model: nn.Module, info: StageInfo) -> list[nn.Module]:
        """The modules that are computed again."""
        return regions_of(model, self.config.recompute_of(info.index), f"stage {info.index}")

    def forward_step(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            unit = stage.unit
            assert unit is not None
            if Action(stage.info.index, "F", unit.microbatch, unit.slice) not in self._forwards:
                return function(*args)
            regions = self._regions[stage.info]
            with recomputing(regions, stage.device, self._is_compared(stage, unit)) as unit.of[Recompute]:
                return function(*args)

        return run

    def kinds(self, stage: Stage) -> Mapping[str, Run]:
        def replay(unit: Unit) -> None:
            if unit.received is not None:
                stage.show(unit)
            for call in unit.of.get(Recompute, ()):
                call.run()

        return {RECOMPUTE.name: replay}

    def _is_compared(self, stage: Stage, unit: Unit) -> bool:
        if self.compares and stage.module not in _compared:
            _compared.add(stage.module)
            self._first[stage.info] = unit.microbatch
        return self._first.get(stage.info) == unit.microbatch
