"""The ties of a step to Megatron, where that has been imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...frameworks import AroundForward, ForwardStep, Framework, StepEnd
from ...parallel_state import Groups
from ...plan import Schedule
from . import segments, settings
from .finish import finish
from .loaded import groups, loaded

__all__ = ["framework"]


class Megatron(Framework):
    """Megatron's groups, its settings, what its schedules do around forwards, and the end of a step."""

    def groups(self) -> Groups | None:
        return groups()

    def check_groups(self, groups: Any) -> None:
        settings.check_groups(groups)

    def read_config(self, config: Any, schedule: Schedule) -> dict[str, Any]:
        return settings.read_config(config, schedule)

    def around_forwards(self, model: nn.Module, num_forwards: int, device: torch.device) -> AroundForward | None:
        return settings.around_forwards(model, num_forwards, device)

    def find_cut(self, model: nn.Module) -> Callable[[ForwardStep], ForwardStep] | None:
        return segments.find_cut(model)

    def random_streams(self) -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
        """Those of its tracker, which dropout in tensor-parallel regions and attention draws from."""
        random = loaded("tensor_parallel.random")
        if random is not None:
            tracker = random.get_cuda_rng_tracker()
            yield tracker.get_states, tracker.set_states

    @contextmanager
    def around_finalizing(self, end: StepEnd) -> Iterator[None]:
        with finish(end), settings.reset_offloading(end):
            yield


framework = Megatron()
