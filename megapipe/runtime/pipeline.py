"""The verbs, at work: what is in flight on this rank.

A unit is made when its forward begins, handed to its stage action by action, and dropped after its last one. Messages
wait at the boundaries.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ..overlap import filling_windows
from ..p2p_communication import Transfer
from ..plan import FORWARD, KINDS, RECOMPUTE, WEIGHTS, Action, Kind, Verbs, unit_in_words
from ..stages import NOTHING, Forward, Stage, StepArguments, Unit, has_segments, run_pair
from ..weight_grad import unshared
from .boundary import Above, Below
from .first_step import FirstStep
from .grad_sync import GradientSync
from .monitor import Monitor
from .plans import PlanKey

__all__ = ["Chunk", "Pipeline", "checkpoint_arguments"]


class Chunk:
    """One stage of this rank, the boundaries around it, and its units in flight.

    Args:
        actions: by kind, those of the stage in this step, in its order.
        first_step: looks at what it does; None where nothing does.
    """

    def __init__(
        self,
        stage: Stage,
        below: Below,
        above: Above,
        actions: Mapping[str, Sequence[Action]],
        first_step: FirstStep | None,
    ) -> None:
        self.stage = stage
        self.index = stage.info.index
        self.can_overlap = has_segments(stage.module)
        self.may_wait = {name for name, kind in KINDS.items() if kind.message is not None}
        """Kinds of action that may have overlap windows: as those of the first unit in the step, so those of others."""
        self.actions = actions
        self.below = below
        self.above = above
        self.first_step = first_step
        self.units: dict[tuple[int, int], Unit] = {}
        """Units in flight, by microbatch and slice."""

    def begin(self, action: Action) -> Unit:
        """The unit of a forward."""
        self.units[action.microbatch, action.slice] = unit = Unit(action.microbatch, action.slice)
        return unit

    def keep_output(self, unit: Unit) -> None:
        """After a forward: to be sent."""
        output, unit.output = unit.output, None
        if output is not None:
            output.tensors = [unshared(tensor) for tensor in output.tensors]  # which nothing else holds any longer
            self.above.put_output(output)

    def keep_gradients(self, unit: Unit) -> None:
        """After a backward: to be sent."""
        grads, unit.input_grads = unit.input_grads, None
        assert grads is not None
        unit.release()
        self.below.put_gradient(grads)

    def end(self, unit: Unit) -> None:
        del self.units[unit.microbatch, unit.slice]

    def send(self, kind: Kind, number: int) -> None:
        """What an action of this number has made, unless others are to be sent before it."""
        self.above.send_output(number) if kind.is_forward else self.below.send_gradient(number)

    def is_empty(self) -> bool:
        return not self.units and self.below.is_empty() and self.above.is_empty()


class Pipeline(Verbs):
    """One step of a pipeline on one rank. A schedule drives it.

    Args:
        key: of the plan that the schedule follows.
        sync: told when gradients become complete.
        posted_ahead: `Plan.posted_ahead` of this rank; empty where the transport posts receives in its own way.
    """

    def __init__(
        self,
        key: PlanKey,
        pp_rank: int,
        chunks: Sequence[Chunk],
        step: StepArguments,
        sync: GradientSync,
        monitor: Monitor,
        posted_ahead: Mapping[Action, Sequence[Action]],
    ) -> None:
        super().__init__(key.schedule.placement, pp_rank, *key[1:4], step.forward_only, key.settings, key.num_slices)
        self._chunks = chunks
        self._results = step.results
        self._sync = sync
        self._monitor = monitor
        self._posted_ahead = posted_ahead
        self._checkpoint_arguments = checkpoint_arguments(key, pp_rank, step)
        self._recomputed = frozenset() if step.forward_only else key.recomputed(pp_rank)
        self._offloaded = frozenset() if step.forward_only else key.offloaded(pp_rank)
        self._weights_per_window = 0 if step.forward_only else step.config.weights_per_window
        self._pending_units: dict[Unit, None] = {}
        """Whose W is still to come, in the order of their Bs."""
        self._has_waited = False

    # Messages

    def recv_forward(self, chunk: int = 0) -> None:
        self._advance("recv_forward", chunk)
        self._chunks[chunk].below.recv_input()

    def send_forward(self, chunk: int = 0) -> None:
        number = self._advance("send_forward", chunk)
        this = self._chunks[chunk]
        this.above.send_output(number)
        this.below.post_ahead()

    def recv_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            self._advance("recv_backward", chunk)
            self._chunks[chunk].above.recv_gradient()

    def send_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            number = self._advance("send_backward", chunk)
            this = self._chunks[chunk]
            this.below.send_gradient(number)
            this.above.post_ahead()

    # Computations

    def recompute_step(self, chunk: int = 0) -> None:
        if self._recomputed and self.num_backwards_left(chunk):
            number = self._counts["backward_step"][chunk]
            action = self._chunks[chunk].actions[RECOMPUTE.name][number]
            if (
                action._replace(kind=FORWARD.name) in self._recomputed
                and self._next_optional(RECOMPUTE.name, chunk) == number
            ):
                self.run(RECOMPUTE.name, chunk)

    def run(self, kind: str, chunk: int | None = 0, number: int | None = None) -> None:
        row = KINDS[kind]
        if self.forward_only and not row.is_forward:
            return
        chunk, number = self._begin(kind, chunk, number)
        this = self._chunks[chunk]
        action = this.actions[kind][number]
        with self._monitor.at(action):
            unit = self._await(row, chunk, number, action)
            self._post_ahead(action)
            if self._weights_per_window and kind in this.may_wait:
                with filling_windows(partial(self._fill_window, unit)):
                    self._compute(row, chunk, unit)
                if not unit.has_windows:
                    this.may_wait.remove(kind)
            else:
                self._compute(row, chunk, unit)
            self._end(row, chunk, number, unit)

    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        (name, chunk), (other_name, other_chunk) = first, second
        kind, other = KINDS[name], KINDS[other_name]
        # A plan's order: what the first of a pair makes is sent first, which is the forward where they overlap.
        is_overlapped = (kind.message, other.message) == ("forward", "backward") and self.num_slices == 1
        if is_overlapped and not self.forward_only and self._chunks[chunk].can_overlap:
            self._overlap(kind, chunk, other, other_chunk)
            return
        self.run(name, chunk)
        if kind.is_forward or (kind.message is not None and not self.forward_only):
            self._chunks[chunk].send(kind, self._counts[self._steps[name]][chunk] - 1)
        self.run(other_name, other_chunk)

    def finish(self) -> list[Any]:
        """Wait until everything sent has been taken. Returns what the loss function reported."""
        self._check_finished()
        assert all(chunk.is_empty() for chunk in self._chunks), "the schedule ended with work left"
        for chunk in self._chunks:
            chunk.stage.forget_input()
        self._monitor.drain()
        return self._results

    # What they have in common

    def _await(self, kind: Kind, chunk: int, number: int, action: Action) -> Unit:
        """The unit of an action, once its message is there."""
        this = self._chunks[chunk]
        self._sync.before_action()
        if kind.is_forward:
            self._sync.before_forward(chunk, number, self.num_backwards_left(chunk))
            unit, received = this.begin(action), this.below.take_input()
            unit.replays = [] if action in self._recomputed else None
            if received is not None:
                self._wait(received, "the forward input", action, this.below.peer)
                unit.received = received
            if action in self._offloaded:
                this.stage.offload(unit)
            return unit
        unit = this.units[action.microbatch, action.slice]
        if kind.message is not None:
            gradient = this.above.take_gradient()
            if gradient is not None:
                unit.output_grads = self._wait(gradient, "the output gradient", action, this.above.peer)
        return unit

    def _post_ahead(self, action: Action) -> None:
        """Before an action is launched whose message is there: post the receives of those behind it that may be."""
        for behind in self._posted_ahead.get(action, ()):
            chunk = self._chunks[behind.stage // self.pp_size]
            (chunk.below if KINDS[behind.kind].is_forward else chunk.above).post_next()

    def _end(self, kind: Kind, chunk: int, number: int, unit: Unit) -> None:
        """After an action: what it has made is kept, and what is left of its weight gradients computed, behind the
        sending of the input gradients, for which a neighbour may wait."""
        this = self._chunks[chunk]
        if this.first_step is not None:
            this.first_step.look(unit)
        if kind.is_forward:
            this.keep_output(unit)
        elif kind.message is not None:
            this.keep_gradients(unit)
            self._pending_units[unit] = None
        if kind.completes_weights:
            if unit.deferred is not None:
                this.send(kind, number)
                self._complete_weights(WEIGHTS.name, chunk, unit)
            del self._pending_units[unit]
            this.end(unit)
        elif self.forward_only:
            this.end(unit)

    def _compute(self, kind: Kind, chunk: int, unit: Unit) -> None:
        stage = self._chunks[chunk].stage
        if kind.is_forward:
            stage.run(kind.name, unit, *next(self._checkpoint_arguments))
        elif not kind.completes_weights or (kind.message is not None and unit.has_windows):
            stage.run(kind.name, unit)
        else:
            self._complete_weights(kind.name, chunk, unit)

    def _fill_window(self, unit: Unit) -> None:
        """Compute gradients left to pending Ws in an overlap window of this unit: the oldest first, its own last."""
        unit.has_windows = True
        deferred = [one.deferred for one in (*self._pending_units, unit) if one.deferred is not None]
        for _ in range(self._weights_per_window):
            if not any(grads.compute_next() for grads in deferred):
                return

    def _complete_weights(self, kind: str, chunk: int, unit: Unit) -> None:
        """Run what may complete the gradients of a chunk."""
        is_last = not self.num_backwards_left(chunk) and not self.num_pending_weights(chunk)
        in_w = unit.deferred is not None
        with self._sync.last_gradients(chunk, in_w) if is_last else NOTHING:
            self._chunks[chunk].stage.run(kind, unit)
            if in_w:
                self._sync.after_weights(chunk)

    def _overlap(self, forward: Kind, forward_chunk: int, backward: Kind, backward_chunk: int) -> None:
        """Run a pair in segments. The output is sent as soon as it is there."""
        forwards, backwards = self._chunks[forward_chunk], self._chunks[backward_chunk]
        _, number = self._begin(forward.name, forward_chunk)
        action = forwards.actions[forward.name][number]
        with self._monitor.at(action):
            unit = self._await(forward, forward_chunk, number, action)

        def done() -> None:
            self._end(forward, forward_chunk, number, unit)
            forwards.send(forward, number)

        begun = Forward(forwards.stage, unit, next(self._checkpoint_arguments), done)
        _, of_backward = self._begin(backward.name, backward_chunk)
        other = backwards.actions[backward.name][of_backward]
        with self._monitor.at(other):
            in_flight = self._await(backward, backward_chunk, of_backward, other)
            self._post_ahead(other)
            run_pair(begun, backwards.stage, in_flight, self._fill_window)
            self._end(backward, backward_chunk, of_backward, in_flight)
        self._monitor.are_overlapped(action, other)

    def _wait(self, transfer: Transfer, what: str, action: Action, peer: int | None) -> list[Tensor]:
        if not self._has_waited:  # that is while the pipeline fills, so there is time
            self._has_waited = True
            for chunk in self._chunks:
                chunk.below.post_all()
                chunk.above.post_all()
        unit = unit_in_words(action.microbatch, action.slice, self.num_slices)
        return self._monitor.wait(transfer, f"{what} of {unit}", peer)


def checkpoint_arguments(key: PlanKey, pp_rank: int, step: StepArguments) -> Iterator[tuple[bool, ...]]:
    """The third argument of forward_step_func, for each forward of this rank: whether to recompute all activations.
    None where the config asks for nothing; of those in flight at a time the first few recompute only in part."""
    num_partial = step.config.num_microbatches_with_partial_activation_checkpoints
    if num_partial is None or key.pp_size == 1:  # as in Megatron: without a pipeline nothing is in flight at a time
        return itertools.repeat(())
    return itertools.cycle([(k >= num_partial,) for k in range(key.plan.peak_in_flight(pp_rank))])
