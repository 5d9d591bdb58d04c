"""Options that measure a step: `config.timers` (Megatron's) and `config.record_timeline`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor

from ..p2p_communication import Transfer
from ..plan import Action, Kind
from ..stages import ActionFunction, Call, Extension, Stage, UnitState
from ..timing import StepRecord


class Timers(Extension):
    """Runs Megatron's timers during the loops of a step, each forward and each backward. They are stopped after errors
    too."""

    def begin(self, call: Call) -> AbstractContextManager[Any]:
        return self._timed("forward-backward", 1, barrier=self.config.barrier_with_L1_time)

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        name = "forward-compute" if kind.is_forward else "backward-compute"

        def timed(unit: UnitState, *extra: bool) -> None:
            with self._timed(name, 2):
                run(unit, *extra)

        return timed

    @contextmanager
    def _timed(self, name: str, level: int, **options: bool) -> Iterator[None]:
        timer = self.config.timers(name, log_level=level)
        timer.start(**options)
        try:
            yield
        finally:
            timer.stop()


class RecordTimeline(Extension):
    """Records the times of a training step, or of a step of a schedule without backwards."""

    def takes_part(self, call: Call) -> bool:
        return call.schedule.forward_only or not call.forward_only

    def begin(self, call: Call) -> AbstractContextManager[Any] | None:
        self._call = call
        self._record: StepRecord = self.config.record_timeline.begin(call.schedule.name, call.device)
        storages: AbstractContextManager[Any] | None = self._record.storages
        return storages

    def monitor(self, monitor: Any) -> Any:
        return _Recording(monitor, self._record)

    def end(self) -> None:
        self._record.finish()
        if not self._call.is_void:
            self.config.record_timeline.keep(self._record)


class _Recording:
    """A monitor that records the times of actions and waits."""

    def __init__(self, monitor: Any, record: StepRecord) -> None:
        self._monitor = monitor
        self._record = record

    def at(self, action: Action) -> AbstractContextManager[object]:
        return self._record.during(action, self._monitor.at(action))

    def are_overlapped(self, *actions: Action) -> None:
        self._record.overlapped.update(actions)

    def wait(self, transfer: Transfer, what: str, peer: int | None) -> list[Tensor]:
        since = self._record.now()
        tensors: list[Tensor] = self._monitor.wait(transfer, what, peer)
        self._record.waited(since)
        return tensors

    def drain(self) -> None:
        since = self._record.now()
        if self._monitor.drain():
            self._record.waited(since)
