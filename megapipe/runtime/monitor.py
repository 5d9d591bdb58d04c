"""Notes where this rank is in its step, for the watchdog, the profiler and the record of times."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..failures import Progress, Watchdog
from ..p2p_communication import Transfer, Transport
from ..plan import Action

NOTHING = nullcontext()
"""The context of an action without profiler. There is one for all actions, since making one takes as long as a small
layer."""
NO_BOARD = SimpleNamespace(failure=None)
"""The failure board of a pipeline with one rank."""


class Monitor:
    """Is told of each action and each wait of one step.

    Args:
        watchdog, transport: None for a pipeline of one rank.
    """

    def __init__(self, watchdog: Watchdog | None, transport: Transport | None) -> None:
        self._watchdog = watchdog
        self._board: Any = NO_BOARD if watchdog is None else watchdog.board
        self._transport = transport
        self._mark = None if transport is None else transport.mark
        self._progress = Progress() if watchdog is None else watchdog.progress
        self._profiling = torch._C._autograd._profiler_enabled()

    def at(self, action: Action) -> AbstractContextManager[object]:
        """Called before an action. Returns a context to run it in.

        Raises:
            PipelineError: another rank has failed.
        """
        if self._board.failure is not None:
            self._check()
        self._progress.action = action
        return record_function(str(action)) if self._profiling else NOTHING

    def are_overlapped(self, *actions: Action) -> None:
        """Called after two actions that ran overlapped: only the sum of their times has a meaning."""

    def wait(self, transfer: Transfer, what: str, peer: int | None) -> list[Tensor]:
        """Wait for a message from `peer` and return its tensors. `peer` is None for a message of this rank to itself.
        `what` names the message in error texts."""
        progress = self._progress
        progress.peer = peer
        progress.awaited = what
        is_reached = None if self._mark is None or peer is None else self._mark()
        tensors = transfer.wait()
        if is_reached is not None:
            assert self._mark is not None
            assert self._watchdog is not None
            is_over = self._mark()
            here = Progress(progress.step, progress.action, what, peer)  # which no later wait changes
            self._watchdog.device_waits.add(here, is_reached, is_over)
        progress.awaited = None
        if self._board.failure is not None:
            self._check()
        return tensors

    def _check(self) -> None:
        assert self._watchdog is not None
        self._watchdog.check()

    def drain(self) -> bool:
        """Wait at the end of a step until every message sent has been taken. False where there are no others."""
        if self._transport is None:
            return False
        progress = self._progress
        progress.action, progress.peer = "the end of its step", None
        progress.awaited = "its last messages to be taken"
        self._transport.drain()
        progress.awaited = None
        if self._board.failure is not None:
            self._check()
        return True
