"""`config.post_validated_optimizer`: forwards with weights that may still be rolled back, and are then run again.

A rank goes on to its next step before it knows whether its last optimizer step stands. Until then it runs forwards
only, which change nothing outside of the pipeline. If that step is rolled back, every rank stops at a point known from
the plan, takes the messages that are still under way, and runs the step again with the same data and random numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..activations import restores_of
from ..plan import Event, Plan
from ..runtime import BeginAgain
from ..stages import Call, Extension


def validation_points(plan: Plan) -> list[int]:
    """Per rank, how many of its events in `plan` may come before it knows whether the last optimizer step stands.

    Those before it takes its first output gradient. Fewer where it would take an input that another rank sends only
    behind its own point: after a rollback that input never comes.
    """
    points = [next(k for k, event in enumerate(events) if event.verb == "recv_backward") for events in plan.events]
    sent_at = {event: k for events in plan.events for k, event in enumerate(events) if event.verb == "send_forward"}

    def comes(event: Event) -> bool:
        sent = event._replace(verb="send_forward", stage=event.stage - 1)
        return event.stage == 0 or sent_at[sent] < points[plan.rank_of(sent.stage)]

    while True:
        earlier = [
            next((k for k, e in enumerate(events[:point]) if e.verb == "recv_forward" and not comes(e)), point)
            for events, point in zip(plan.events, points)
        ]
        if earlier == points:
            return points
        points = earlier


class PostValidation(Extension):
    """Validates the last optimizer step before the first backward of a rank."""

    _is_validated = True
    """Whether the last optimizer step is known to stand, or has been rolled back."""

    def begin(self, call: Call) -> None:
        optimizer = self.config.post_validated_optimizer
        self._is_validated = True
        if call.forward_only or self.watchdog is None:  # a pipeline of one rank waits for no other
            optimizer.finalize_everywhere()
        elif optimizer.has_pending_step:
            self._is_validated = False
            plan = self.plan()
            before = [events[:point] for events, point in zip(plan.events, validation_points(plan))]
            self._num_inputs = sum(event.verb == "recv_forward" for event in before[self.pp_rank])
            sent = (event.stage for events in before for event in events if event.verb == "send_forward")
            self._num_sent = Counter(sent)  # by each stage, before the point of its rank
            recorded = {id(it): _Recorded(it, call.device) for it in call.data_iterators if it is not None}
            call.data_iterators = [None if it is None else recorded[id(it)] for it in call.data_iterators]
            self._iterators = list(recorded.values())
            self._restores = restores_of(call.device, call.models)

    def before_receive(self, way: str) -> None:
        """Raises BeginAgain where this message is behind the point, and the optimizer step was rolled back."""
        if self._is_validated:
            return
        is_behind = way == "backward" or self._num_inputs == 0
        self._num_inputs -= way == "forward"
        if is_behind:
            self._is_validated = True
            if self._validate():
                raise BeginAgain(self._num_sent)
            self._forget(again=False)

    def may_post_ahead(self) -> bool:
        """After a rollback the message might be another one."""
        return self._is_validated

    def again(self) -> None:
        for restore in self._restores:
            restore()
        self._forget(again=True)

    def _forget(self, again: bool) -> None:
        for iterator in self._iterators:
            iterator.stop(again)
        self._iterators, self._restores = [], []

    def _validate(self) -> bool:
        assert self.watchdog is not None
        position = self.watchdog.progress
        position.action, position.peer = "the validation of the last optimizer step", None
        position.awaited = "the norms of all ranks"
        is_rolled_back: bool = self.config.post_validated_optimizer.validate(self.watchdog.check)
        position.awaited = None
        return is_rolled_back


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
