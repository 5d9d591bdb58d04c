"""Ranks that fail within a forward."""

from __future__ import annotations

import itertools
import os
import signal
from typing import Any

from tools.models import forward_step


def raising(error: Exception, at: int = 0) -> Any:
    """A forward_step_func that raises the error in its forward number `at`."""
    numbers = itertools.count()

    def step(data_iterator: Any, model: Any) -> Any:
        if next(numbers) == at:
            raise error
        return forward_step(data_iterator, model)

    return step


def killed(data_iterator: Any, model: Any) -> Any:
    """A forward_step_func that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)
