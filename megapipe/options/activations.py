"""Options that lower the memory of activations. `config.recompute`: they are recomputed before their backward, by an
action of its own (R). `config.offload_activations`: they are in host memory from O to L, while they wait for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import proxy

from torch import nn

from ..activations import Offload, recomputing, regions_of, storages_of
from ..chunks import tensors_of
from ..plan import FORWARD, LOAD, OFFLOAD, RECOMPUTE, Action, Kind, StageInfo
from ..stages import ActionFunction, Call, Extension, Stage, UnitState
from ..structure import Structure, plain_values


class Compared(Extension):
    """Activations that come back are compared with those that were saved, to the last bit: for the first unit of each
    chunk, until a step with that has succeeded, and again when the structure of the chunk, a plain value in one of its
    modules, or what is computed again has changed."""

    compares = True
    _forwards: frozenset[Action]
    """Those of this rank whose activations go and come back."""

    def takes_part(self, call: Call) -> bool:
        self._call = call
        self._structures: dict[StageInfo, Structure] = dict(zip(call.stages, call.structures))
        self._first: dict[StageInfo, int] = {}
        self._like: dict[StageInfo, Any] = {}
        return not call.forward_only

    def is_of(self, stage: Stage, unit: UnitState) -> bool:
        """Whether the unit's F is one of these."""
        return Action(stage.info.index, FORWARD.name, unit.microbatch, unit.slice) in self._forwards

    def is_compared(self, stage: Stage, unit: UnitState) -> bool:
        info = stage.info
        if info not in self._like and self.compares:
            values = [item for module in stage.module.modules() for item in plain_values(module).items()]
            self._like[info] = (self.config.recompute_of(info.index), *values)
            if self._structures[info].kept.get(type(self)) != self._like[info]:
                self._first[info] = unit.microbatch
        return self._first.get(info) == unit.microbatch

    def end(self) -> None:
        for info in () if self._call.is_void else self._first:
            self._structures[info].kept[type(self)] = self._like[info]


class Recompute(Compared):
    """The F of a unit that has an R keeps nothing, and the R makes what any other F keeps."""

    def takes_part(self, call: Call) -> bool:
        if not super().takes_part(call):
            return False
        self._forwards = self.get_plan().recomputed[self.pp_rank]
        self._regions = {info: self._regions_of(model, info) for model, info in zip(call.models, call.stages)}
        return bool(self._forwards)

    def _regions_of(self, model: nn.Module, info: StageInfo) -> list[nn.Module]:
        """The modules that are computed again."""
        return regions_of(model, self.config.recompute_of(info.index), f"stage {info.index}")

    def forward_step(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        stage = proxy(stage)  # which will hold this function

        def run(*args: Any) -> Any:
            unit = stage.unit
            assert unit is not None
            if not self.is_of(stage, unit):
                return function(*args)
            regions = self._regions[stage.info]
            with recomputing(regions, stage.device, self.is_compared(stage, unit)) as unit.kept_by[Recompute]:
                return function(*args)

        return run

    def kinds(self, stage: Stage) -> Mapping[str, ActionFunction]:
        def replay(unit: UnitState) -> None:
            if unit.received is not None:
                stage.give_input(unit)
            for call in unit.kept_by.get(Recompute, ()):
                call.run()

        return {RECOMPUTE.name: replay}


class Offloading(Compared):
    """Moves what the Fs save that have an O in the plan."""

    def takes_part(self, call: Call) -> bool:
        if not super().takes_part(call):
            return False
        self._forwards = self.get_plan().offloaded[self.pp_rank]
        self._storages: dict[StageInfo, set[int]] = {}
        return bool(self._forwards)

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        if kind is not FORWARD:
            return run

        def forward(unit: UnitState, *extra: bool) -> None:
            if not self.is_of(stage, unit):
                run(unit, *extra)
                return
            if (offload := unit.kept_by.get(Offloading)) is None:
                unit.kept_by[Offloading] = offload = self._begin(stage, unit)
                # Also where nothing of it is used: memory that is copied to must not be freed.
                unit.before_backward.append(offload.wait)
            with offload.saving():
                run(unit, *extra)
            if unit.parts is None:  # it is done
                offload.begin()

        return forward

    def kinds(self, stage: Stage) -> Mapping[str, ActionFunction]:
        return {
            OFFLOAD.name: lambda unit: unit.kept_by[Offloading].free(),
            LOAD.name: lambda unit: unit.kept_by[Offloading].load(),
        }

    def _begin(self, stage: Stage, unit: UnitState) -> Offload:
        if stage.info not in self._storages:  # those of parameters and buffers, which stay where they are
            self._storages[stage.info] = storages_of(tensors_of(stage.module))
        received = [] if unit.received is None else unit.received.tensors
        what = f"stage {stage.info.index} ({type(stage.module).__name__})"
        storages = self._storages[stage.info] | storages_of(received)
        return Offload(stage.device, storages, what, self.is_compared(stage, unit))
