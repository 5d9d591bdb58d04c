"""`config.post_validated_optimizer`: a step begins on weights that may still be rolled back, and is then run once more.

A rank goes on to its next step before it knows whether its last optimizer step stands. It knows before its first
backward, and every rank finds the same. If the optimizer step is rolled back, the step that has begun is void: it goes
on to its end, so that every message is sent and taken, but its backwards compute nothing. Then it is run once more,
with the same data, random numbers and buffers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..activations import restores_of
from ..plan import RECOMPUTE, Kind
from ..runtime import GradientSync
from ..stages import ActionFunction, Call, Extension, Stage, UnitState


class PostValidation(Extension):
    """Validates the last optimizer step before the first backward of a rank."""

    _is_ahead = False
    """Whether this step begins before the last optimizer step is known to stand."""
    _is_validated = False

    def begin(self, call: Call) -> None:
        optimizer = self.config.post_validated_optimizer
        if call.forward_only or self.watchdog is None:  # a pipeline of one rank waits for no other
            optimizer.finalize_everywhere()
        elif optimizer.has_pending_step:
            optimizer.check_weights()
            self._is_ahead = True
            self._call = call
            recorded = {id(it): _Recorded(it, call.device) for it in call.data_iterators if it is not None}
            call.data_iterators = [None if it is None else recorded[id(it)] for it in call.data_iterators]
            self._iterators = list(recorded.values())
            self._restores = restores_of(call.device, call.models)

    def gradient_sync(self, make: Callable[..., GradientSync]) -> Callable[..., GradientSync]:
        if not self._is_ahead:
            return make

        def made(*arguments: Any) -> GradientSync:
            self._sync = make(*arguments)
            return self._sync

        return made

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        if not self._is_ahead or not (kind.direction == "backward" or kind is RECOMPUTE):
            return run

        def validated(unit: UnitState) -> None:
            if kind is not RECOMPUTE:
                self._validate()
                if self._call.is_void:
                    unit.edges = []  # without which there is nothing to compute
            elif self._call.is_void:
                return
            run(unit)

        return validated

    def end(self) -> None:
        if self._is_ahead and self._call.is_void:
            for restore in self._restores:
                restore()
            self._forget(again=True)

    def _validate(self) -> None:
        if self._is_validated:
            return
        assert self.watchdog is not None
        self._is_validated = True
        position = self.watchdog.progress
        position.awaited, position.peer = "the norms of all ranks, by which the last optimizer step stands or not", None
        is_rolled_back: bool = self.config.post_validated_optimizer.validate(self.watchdog.check)
        position.awaited = None
        self._call.is_void = self._sync.is_void = is_rolled_back
        if not is_rolled_back:
            self._forget(again=False)

    def _forget(self, again: bool) -> None:
        for iterator in self._iterators:
            iterator.stop(again)
        self._iterators, self._restores = [], []


class _Recorded(Iterator[Any]):
    """An iterator that can begin again, until told to stop. What it drew of random numbers is drawn then, too."""

    def __init__(self, iterator: Iterator[Any], device: torch.device) -> None:
        self._iterator = iterator
        self._device = device
        self._seen: list[tuple[Any, list[Callable[[], None]]]] | None = []
        self._again: deque[tuple[Any, list[Callable[[], None]]]] = deque()

    def __next__(self) -> Any:
        if self._again:
            item, restores = self._again.popleft()
            for restore in restores:
                restore()
            return item
        item = next(self._iterator)
        if self._seen is not None:
            self._seen.append((item, restores_of(self._device)))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def stop(self, again: bool) -> None:
        """Keep no more items; with `again`, begin with those that were kept."""
        if again:
            self._again.extend(self._seen or ())
        self._seen = None
