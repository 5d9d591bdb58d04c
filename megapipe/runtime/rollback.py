"""Forwards with weights that may still be rolled back, and running them again if they are.

A rank goes on to its next step before it knows whether its last optimizer step stands. Until then it runs forwards
only, which change nothing outside of the pipeline. If that step is rolled back, every rank stops at a point known from
the plan, takes the messages that are still under way, and runs the step again with the same data and random numbers.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..failures import Watchdog
from ..p2p_communication import Communicator
from ..plan import FORWARD, Action, Event, Plan
from ..sharding import ShardedChunks
from ..stages import StepArguments
from .pipeline import Pipeline
from .plans import PlanKey
from .restoring import restores_of_buffers, restores_of_random_states

__all__ = [
    "RollbackRequired",
    "Speculation",
    "SpeculativePipeline",
    "speculate",
    "validation_points",
]


class RollbackRequired(Exception):  # noqa: N818  # no error: the step is run again
    """The forwards of this step ran with weights that have been rolled back."""


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


def speculate(step: StepArguments, key: PlanKey, pp_rank: int, watchdog: Watchdog | None) -> Speculation | None:
    """Support for a step that begins before the last optimizer step has been validated.

    Args:
        watchdog: None for a pipeline of one rank, which waits for no other.

    Returns:
        None for a step whose weights are known to stand.
    """
    optimizer = step.config.post_validated_optimizer
    if optimizer is None:
        return None
    if step.forward_only or watchdog is None:
        optimizer.finalize_everywhere()
        return None
    if not optimizer.has_pending_step:
        return None

    def validate() -> bool:
        position = watchdog.progress
        position.action, position.peer = "the validation of the last optimizer step", None
        position.awaited = "the norms of all ranks"
        is_rolled_back = optimizer.validate(watchdog.check)
        position.awaited = None
        return is_rolled_back

    return Speculation(validate, key.plan, pp_rank, step)


class Speculation:
    """One training step that begins before it is known whether the last optimizer step stands.

    Args:
        validate: waits until that is known, and returns whether it was rolled back.
    """

    def __init__(self, validate: Callable[[], bool], plan: Plan, pp_rank: int, step: StepArguments) -> None:
        self._validate = validate
        self._step = step
        before = [events[:point] for events, point in zip(plan.events, validation_points(plan))]
        self._num_inputs = sum(event.verb == "recv_forward" for event in before[pp_rank])
        self.num_sent = Counter(event.stage for events in before for event in events if event.verb == "send_forward")
        """The outputs that each stage sends before the point of its rank."""
        self.is_validated = False
        self._iterators = {id(it): _Recorded(it, step.device) for it in step.data_iterators if it is not None}
        step.data_iterators = [None if it is None else self._iterators[id(it)] for it in step.data_iterators]
        self._restore = [*restores_of_random_states(step.device), *restores_of_buffers(step.models)]

    def before_recv_forward(self) -> None:
        """Raises RollbackRequired where this input is behind the point, and the optimizer step was rolled back."""
        if self._num_inputs == 0:
            self.before_backward()
        self._num_inputs -= 1

    def before_backward(self) -> None:
        if not self.is_validated:
            self.is_validated = True
            if self._validate():
                raise RollbackRequired
            self._forget(again=False)

    def begin_again(self, pipe: SpeculativePipeline, communicator: Communicator, sharded: ShardedChunks | None) -> None:
        """Restore everything that the forwards have changed, so that the step can be run again over the same
        boundaries."""
        if sharded is not None:
            sharded.drop_forwards()
        pipe.discard_forwards()
        communicator.begin_again()
        for restore in self._restore:
            restore()
        self._step.results.clear()
        self._step.num_tokens.zero_()
        self._forget(again=True)

    def _forget(self, again: bool) -> None:
        for iterator in self._iterators.values():
            iterator.stop(again)
        self._restore.clear()


class SpeculativePipeline(Pipeline):
    """A pipeline whose weights may not stand until its first backward."""

    def __init__(self, speculation: Speculation, *args: Any) -> None:
        super().__init__(*args)
        self._speculation = speculation

    def recv_forward(self, chunk: int = 0) -> None:
        self._speculation.before_recv_forward()
        super().recv_forward(chunk)

    def recv_backward(self, chunk: int = 0) -> None:
        self._speculation.before_backward()
        super().recv_backward(chunk)

    def _post_ahead(self, action: Action) -> None:
        """After a rollback the message might be another one."""
        if self._speculation.is_validated:
            super()._post_ahead(action)

    def discard_forwards(self) -> None:
        """Take the messages that other ranks send until they roll back too."""
        for chunk in self._chunks:
            for transfer in chunk.below.discard_inputs(self._speculation.num_sent[chunk.index - 1]):
                self._wait(transfer, "an input to be discarded", chunk.actions[FORWARD.name][0], chunk.below.peer)
            chunk.above.discard_outputs()


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
            self._seen.append((item, [*restores_of_random_states(self._device)]))
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def stop(self, again: bool) -> None:
        """Keep no more items; with `again`, begin with those that were kept."""
        if again:
            self._again.extend(self._seen or ())
        self._seen = None
