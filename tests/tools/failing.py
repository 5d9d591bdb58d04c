"""Ranks that fail within a forward, and what the others hear of it."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from tools.models import forward_step

from megapipe import PipelineError
from megapipe.failures import Board


def raising(error: Exception, at: int = 0) -> Any:
    """A forward_step_func that raises the error in its forward number `at`."""

    def raise_it() -> None:
        raise error

    return calling(raise_it, at)


def calling(function: Callable[[], Any], at: int) -> Any:
    """A forward_step_func that calls the function in front of its forward number `at`."""
    numbers = itertools.count()

    def step(data_iterator: Any, model: Any) -> Any:
        if next(numbers) == at:
            function()
        return forward_step(data_iterator, model)

    return step


def killed(data_iterator: Any, model: Any) -> Any:
    """A forward_step_func that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)


def heard(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """The text of what the call raises: the error of another rank, or one of these kinds."""
    with pytest.raises((PipelineError, *kinds)) as caught:
        call()
    return str(caught.value)


def wait_for_failure() -> None:
    """Until this rank's helper thread has heard of one."""
    board = Board.current()
    assert board is not None
    while board.failure is None:
        time.sleep(0.01)
