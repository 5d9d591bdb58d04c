"""For tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.checkpoint.reading import Reader


def everything_in(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of the model and the optimizer."""
    reader = Reader(checkpoint)
    tensors = {key: reader.empty(key) for key in reader.contents if key.startswith(("model.", "optimizer."))}
    reader.read(tensors)
    return tensors


def error_of(call: Callable[[], Any], *kinds: type[Exception]) -> str:
    try:
        call()
    except (ValueError, TypeError, RuntimeError, *kinds) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def filled(value: float) -> nn.Linear:
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, value)
    return layer


class Counting(torch.optim.SGD):
    """State of no parameter, as MADGRAD's."""

    def step(self, closure: None = None) -> None:
        super().step()
        self.state["k"] = self.state.get("k", torch.tensor(0)) + 1
