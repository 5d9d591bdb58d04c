"""Where this rank is in its step, for the watchdog, the profiler and the record of times."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.profiler import record_function

from ..failures import Progress, Watchdog
from ..p2p_communication import Communicator, Transfer
from ..plan import Action
from ..stages import NOTHING
from ..timing import StepRecord

__all__ = ["Monitor"]


class Monitor:
    """Accompanies the actions and the waits of one step.

    Args:
        watchdog, communicator: None for a pipeline of one rank.
        record: where times are written down; None for nowhere.
    """

    def __init__(self, watchdog: Watchdog | None, communicator: Communicator | None, record: StepRecord | None) -> None:
        self._watchdog = watchdog
        self._check: Callable[[], None] = (lambda: None) if watchdog is None else watchdog.check
        self._communicator = communicator
        self._record = record
        self._progress = Progress() if watchdog is None else watchdog.progress
        self._profiling = torch._C._autograd._profiler_enabled()

    def at(self, action: Action) -> AbstractContextManager[object]:
        """The context around an action. Raises what another rank's failure has left for this one."""
        self._check()
        self._progress.action = action
        profiled = record_function(str(action)) if self._profiling else NOTHING
        return profiled if self._record is None else self._record.during(action, profiled)

    def are_overlapped(self, *actions: Action) -> None:
        """Only the sum of the times of these means anything."""
        if self._record is not None:
            self._record.overlapped.update(actions)

    def wait(self, transfer: Transfer, what: str, peer: int | None) -> list[Tensor]:
        """Wait for a message from `peer`, or for one that this rank gave itself where that is None."""
        progress = self._progress
        progress.peer = peer
        progress.awaited = what
        since = None if self._record is None else self._record.now()
        is_reached = None if self._communicator is None or peer is None else self._communicator.mark()
        tensors = transfer.wait()
        if is_reached is not None and self._watchdog is not None and self._communicator is not None:
            is_over = self._communicator.mark()
            assert is_over is not None
            here = Progress(progress.step, progress.action, what, peer)  # which no later wait changes
            self._watchdog.device_waits.add(here, is_reached, is_over)
        if self._record is not None:
            self._record.waited(since)
        progress.awaited = None
        self._check()
        return tensors

    def drain(self) -> None:
        """Wait at the end of a step until every message sent has been taken."""
        if self._communicator is None:
            return
        progress = self._progress
        progress.action, progress.peer = "the end of its step", None
        progress.awaited = "its last messages to be taken"
        since = None if self._record is None else self._record.now()
        self._communicator.drain()
        if self._record is not None:
            self._record.waited(since)
        progress.awaited = None
        self._check()
