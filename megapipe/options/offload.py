"""`config.offload_activations`: activations lie in host memory, from O to L, while they wait for their backward."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakSet

from torch import nn

from ..activations import Offload, storages_of
from ..chunks import tensors_of
from ..plan import FORWARD, LOAD, OFFLOAD, Action, Kind, StageInfo
from ..stages import Call, Extension, Run, Stage, Unit

__all__ = ["Offloading"]

_compared: WeakSet[nn.Module] = WeakSet()
"""Chunks for which what came back has been compared with what was saved."""


class Offloading(Extension):
    """Moves what the Fs save that have an O in the plan."""

    def takes_part(self, call: Call) -> bool:
        if call.forward_only:
            return False
        self._forwards = self.plan().offloaded[self.pp_rank]
        self._first: dict[StageInfo, int] = {}
        self._storages: dict[StageInfo, set[int]] = {}
        return bool(self._forwards)

    def action(self, kind: Kind, stage: Stage, run: Run) -> Run:
        if kind is not FORWARD:
            return run

        def forward(unit: Unit, *extra: bool) -> None:
            if Action(stage.info.index, "F", unit.microbatch, unit.slice) not in self._forwards:
                run(unit, *extra)
                return
            unit.of[Offloading] = offload = self._begin(stage, unit)
            # Also where nothing of it is used: memory that is copied to must not be freed.
            unit.before_backward.append(offload.wait)
            with offload.saving():
                run(unit, *extra)
            offload.begin()

        return forward

    def kinds(self, stage: Stage) -> Mapping[str, Run]:
        def of(unit: Unit) -> Offload:
            if Offloading not in unit.of:
                stage.O(unit)  # which refuses it
            offload: Offload = unit.of[Offloading]
            return offload

        return {OFFLOAD.name: lambda unit: of(unit).free(), LOAD.name: lambda unit: of(unit).load()}

    def _begin(self, stage: Stage, unit: Unit) -> Offload:
        if stage.info not in self._storages:  # those of parameters and buffers, which stay where they are
            self._storages[stage.info] = storages_of(tensors_of(stage.module))
        received = [] if unit.received is None else unit.received.tensors
        if stage.module not in _compared:
            _compared.add(stage.module)
            self._first[stage.info] = unit.microbatch
        what = f"stage {stage.info.index} ({type(stage.module).__name__})"
        is_compared = self._first.get(stage.info) == unit.microbatch
        return Offload(stage.device, self._storages[stage.info] | storages_of(received), what, is_compared)
