"""`config.record_timeline`: when each action and each wait of a step began and ended."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from ..p2p_communication import Transfer
from ..plan import Action
from ..stages import Call, Extension
from ..timing import StepRecord

__all__ = ["Timeline"]


class Timeline(Extension):
    """Writes the record of a training step, or of one of a schedule without backwards."""

    def takes_part(self, call: Call) -> bool:
        return call.schedule.forward_only or not call.forward_only

    def begin(self, call: Call) -> None:
        assert self.config.record_timeline is not None
        self._record: StepRecord = self.config.record_timeline.begin(call.schedule.name, call.device)

    def monitor(self, monitor: Any) -> Any:
        return _Recording(monitor, self._record)

    def step(self) -> AbstractContextManager[Any] | None:
        return self._record.storages

    def end(self) -> None:
        assert self.config.record_timeline is not None
        self._record.finish()
        self.config.record_timeline.keep(self._record)


class _Recording:
    """A monitor that writes down the times of what it accompanies."""

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
        if self._monitor.waits_at_end:
            since = self._record.now()
            self._monitor.drain()
            self._record.waited(since)
