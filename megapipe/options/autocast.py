"""`config.enable_autocast`: forwards under torch.autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..stages import Extension, Stage


class Autocast(Extension):
    """Forwards under torch.autocast, around the caller's forward_step_func."""

    def forward_step(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        dtype = self.config.autocast_dtype or self.config.pipeline_dtype
        run: Callable[..., Any] = torch.autocast(stage.device.type, dtype=dtype)(function)
        return run
