"""The verbs, at work: what is in flight on this rank.

A unit is made when its forward begins, handed to its stage action by action, and dropped after its last one. Messages
wait at the links.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..messages import unshared
from ..overlap import filling_windows
from ..p2p_communication import Link
from ..plan import FORWARD, KINDS, RECOMPUTE, WEIGHTS, Action, Kind, Verbs, actions_of, unit_in_words
from ..stages import ActionFunction, Call, Extension, Forward, Stage, UnitState, run_pair
from .first_step import FirstStep
from .grad_sync import GradientSync
from .monitor import Monitor
from .plans import PlanKey


class Links(NamedTuple):
    """The ends of the channels around a stage: from and to the stage below, to and from the stage above. None where
    there is no such stage: data and loss do not travel."""

    inputs: Link | None
    outputs: Link | None
    output_grads: Link | None
    input_grads: Link | None


class StageState:
    """What a pipeline has of one stage of this rank: its links, its units in flight, and the functions of its actions.

    Args:
        actions: all actions that the stage can run in a step, by the name of their kind.
    """

    stage: Stage
    runs: dict[str, ActionFunction]
    """What each kind of action runs, for a unit."""
    first_step: FirstStep | None
    """Looks at what the stage does; None where nothing does."""

    def __init__(self, actions: Mapping[str, Sequence[Action]], links: Links) -> None:
        self.actions = actions
        self.inputs, self.outputs, self.output_grads, self.input_grads = links
        self.links = [link for link in links if link is not None]
        self.receivers = [link for link in (links.output_grads, links.inputs) if link and link.peer is not None]
        self.waits_for_peer = {
            name
            for name, kind in KINDS.items()
            if kind.direction is not None and (self.inputs if kind.is_forward else self.output_grads) in self.receivers
        }
        """Kinds of action that wait for another rank."""
        self.may_have_windows = {name for name, kind in KINDS.items() if kind.direction is not None}
        """Kinds of action that may have overlap windows: all, but those that had none in an earlier step."""
        self.had_windows: dict[str, bool] = {}
        self.units: dict[tuple[int, int], UnitState] = {}
        """Units in flight, by microbatch and slice."""

    def reset(self, stage: Stage, runs: dict[str, ActionFunction], first_step: FirstStep | None) -> None:
        """A step begins."""
        self.stage, self.runs, self.first_step = stage, runs, first_step
        self.had_windows.clear()
        self.units.clear()
        for link in self.links:
            link.reset()
        if self.inputs is not None:
            self.inputs.post_lookahead()

    def end(self) -> None:
        """The step has succeeded. No model is held until the next one."""
        assert not self.units, "the schedule ended with work left"
        for link in self.links:
            assert link.is_empty(), "the schedule ended with messages left"
        for name, had_some in self.had_windows.items():
            if not had_some:
                self.may_have_windows.discard(name)
        self.stage.forget_input()
        del self.stage, self.runs, self.first_step

    def send(self, kind: Kind, number: int) -> None:
        """What an action of this number has made, unless others are to be sent before it."""
        link = self.outputs if kind.is_forward else self.input_grads
        if link is not None:
            link.send(number)


class Pipeline(Verbs):
    """The steps of a pipeline on one rank. A schedule drives them.

    Args:
        key: of the plan that the schedule follows.
        posted_ahead: `Plan.posted_ahead` of this rank; empty where the transport posts receives in its own way.
    """

    _monitor: Monitor
    _sync: GradientSync | None
    """Told when gradients become complete; None where it is of no interest."""

    def __init__(
        self,
        key: PlanKey,
        pp_rank: int,
        links: Sequence[Links],
        forward_only: bool,
        posted_ahead: Mapping[Action, Sequence[Action]],
    ) -> None:
        super().__init__(key.schedule.placement, pp_rank, *key[1:4], forward_only, key.settings, key.num_slices)
        self._states = [
            StageState(actions_of(info.index, self.num_microbatches, self.num_slices), around)
            for info, around in zip(self.stages, links)
        ]
        self._posted_ahead = posted_ahead
        self._recomputed = frozenset() if forward_only else key.recomputed(pp_rank)
        units = itertools.product(range(self.num_microbatches), range(self.num_slices))
        self._in_words = {unit: unit_in_words(*unit, self.num_slices) for unit in units}
        self._pending_units: dict[UnitState, None] = {}
        """Whose W is still to come, in the order of their Bs."""

    def begin_step(
        self,
        call: Call,
        stages: Sequence[Stage],
        first_steps: Sequence[FirstStep | None],
        extensions: Sequence[Extension],
        monitor: Monitor,
        sync: GradientSync | None,
        checkpoint_arguments: Iterator[tuple[bool, ...]],
    ) -> None:
        """Count from nought."""
        self.reset()
        self._results, self._monitor, self._sync = call.results, monitor, sync
        self._checkpoint_arguments = checkpoint_arguments
        self._weights_per_window = 0 if self.forward_only else call.config.weights_per_window
        self._has_waited = False
        self._pending_units.clear()
        for state, stage, first_step in zip(self._states, stages, first_steps):
            state.reset(stage, self._runs(state, stage, extensions), first_step)

    # Messages

    def recv_forward(self, chunk: int = 0) -> None:
        self._advance("recv_forward", chunk)
        inputs = self._states[chunk].inputs
        if inputs is not None:
            inputs.request()

    def send_forward(self, chunk: int = 0) -> None:
        number = self._advance("send_forward", chunk)
        state = self._states[chunk]
        if state.outputs is not None:
            state.outputs.send(number)
        for receiver in state.receivers:
            receiver.post_lookahead()

    def recv_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            self._advance("recv_backward", chunk)
            output_grads = self._states[chunk].output_grads
            if output_grads is not None:
                output_grads.request()

    def send_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            number = self._advance("send_backward", chunk)
            state = self._states[chunk]
            if state.input_grads is not None:
                state.input_grads.send(number)
            if state.output_grads is not None:
                state.output_grads.post_lookahead()

    # Computations

    def recompute_step(self, chunk: int = 0) -> None:
        if self._recomputed and self.num_backwards_left(chunk):
            number = self._counts["backward_step"][chunk]
            action = self._states[chunk].actions[RECOMPUTE.name][number]
            if (
                action._replace(kind=FORWARD.name) in self._recomputed
                and self._next_optional(RECOMPUTE.name, chunk) == number
            ):
                self.run(RECOMPUTE.name, chunk)

    def run(self, kind_name: str, chunk: int | None = 0, number: int | None = None) -> None:
        kind = KINDS[kind_name]
        if self.forward_only and not kind.is_forward:
            return
        chunk, number = self._next_action(kind_name, chunk, number)
        state = self._states[chunk]
        action = state.actions[kind_name][number]
        with self._monitor.at(action):
            if not self._has_waited and kind_name in state.waits_for_peer:
                self._post_while_idle()
            unit = self._await(kind, chunk, number, action)
            if self._posted_ahead:
                self._post_large_receives(action)
            if kind_name in state.may_have_windows and self._weights_per_window:
                with filling_windows(partial(self._fill_window, unit)):
                    state.runs[kind_name](unit)
                state.had_windows[kind_name] = state.had_windows.get(kind_name, False) or unit.has_windows
            else:
                state.runs[kind_name](unit)
            self._store_result(kind, chunk, number, unit)

    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        (name, chunk), (other_name, other_chunk) = first, second
        kind, other = KINDS[name], KINDS[other_name]
        # A plan's order: what the first of a pair makes is sent first, which is the forward where they overlap.
        is_overlapped = (kind.direction, other.direction) == ("forward", "backward") and self.num_slices == 1
        if is_overlapped and not self.forward_only and self._states[chunk].stage.can_overlap:
            self._overlap(kind, chunk, other, other_chunk)
            return
        self.run(name, chunk)
        if kind.is_forward or (kind.direction is not None and not self.forward_only):
            self._states[chunk].send(kind, self._counts[self._verbs[name]][chunk] - 1)
        self.run(other_name, other_chunk)

    def finish(self) -> list[Any]:
        """Wait until everything sent has been taken. Returns what the loss function reported."""
        self._check_finished()
        for state in self._states:
            state.end()
        self._monitor.drain()
        results, self._results, self._sync = self._results, [], None  # which hold the models
        return results

    # What they have in common

    def _await(self, kind: Kind, chunk: int, number: int, action: Action) -> UnitState:
        """The unit of an action, once its message is there."""
        state = self._states[chunk]
        if self._sync is not None:
            self._sync.before_action()
        if kind.is_forward:
            if self._sync is not None:
                self._sync.before_forward(chunk, number, self.num_backwards_left(chunk))
            state.units[action.microbatch, action.slice] = unit = UnitState(action.microbatch, action.slice)
            if state.inputs is not None:
                unit.received = state.inputs.pop()
                what = f"the forward input of {self._in_words[action.microbatch, action.slice]}"
                self._monitor.wait(unit.received, what, state.inputs.peer)
            return unit
        unit = state.units[action.microbatch, action.slice]
        if kind.direction is not None and state.output_grads is not None:
            what = f"the output gradient of {self._in_words[action.microbatch, action.slice]}"
            unit.output_grads = self._monitor.wait(state.output_grads.pop(), what, state.output_grads.peer)
        return unit

    def _post_while_idle(self) -> None:
        """The pipeline fills, so there is time."""
        self._has_waited = True
        for state in self._states:
            for receiver in state.receivers:
                receiver.post_while_idle()

    def _post_large_receives(self, action: Action) -> None:
        """Before an action is launched whose message is there: post the receives of those behind it that may be."""
        for behind in self._posted_ahead.get(action, ()):
            state = self._states[behind.stage // self.pp_size]
            link = state.inputs if KINDS[behind.kind].is_forward else state.output_grads
            if link is not None:
                link.post_early()

    def _store_result(self, kind: Kind, chunk: int, number: int, unit: UnitState) -> None:
        """After an action: what it has made is kept, and what is left of its weight gradients computed, behind the
        sending of the input gradients, for which a neighbour may wait."""
        state = self._states[chunk]
        if state.first_step is not None:
            state.first_step.observe(unit)
        if kind.is_forward:
            output, unit.output = unit.output, None
            if state.outputs is not None:
                assert output is not None
                for index, tensor in enumerate(output.tensors):
                    output.tensors[index] = unshared(tensor)  # which nothing else holds any longer
                state.outputs.put(output)
        elif kind.direction is not None:
            grads, unit.input_grads = unit.input_grads, None
            if state.input_grads is not None:
                assert grads is not None
                state.input_grads.put(grads)
            self._pending_units[unit] = None
        if kind.completes_weights:
            if unit.deferred is not None:
                state.send(kind, number)
                state.runs[WEIGHTS.name](unit)
            del self._pending_units[unit]
        if kind.completes_weights or self.forward_only:
            del state.units[unit.microbatch, unit.slice]

    # What a kind of action runs

    def _runs(self, state: StageState, stage: Stage, extensions: Sequence[Extension]) -> dict[str, ActionFunction]:
        """What each kind of action of a chunk runs in this step."""
        runs = runs_of(stage, extensions)
        if self._checkpoint_arguments is not NO_ARGUMENTS:
            forward = runs[FORWARD.name]
            runs[FORWARD.name] = lambda unit: forward(unit, *next(self._checkpoint_arguments))
        if self._sync is not None:
            for name, kind in KINDS.items():
                if kind.completes_weights:
                    runs[name] = partial(self._completing, self._states.index(state), runs[name], kind)
        return runs

    def _completing(self, chunk: int, run: ActionFunction, kind: Kind, unit: UnitState) -> None:
        """An action that may complete the gradients of a chunk."""
        assert self._sync is not None
        if kind.direction is not None and unit.has_windows:  # its W is still to come
            run(unit)
            return
        is_last = not self.num_backwards_left(chunk) and not self.num_pending_weights(chunk)
        in_w = unit.deferred is not None
        with self._sync.last_gradients(chunk, in_w) if is_last else nullcontext():
            run(unit)
            if in_w:
                self._sync.after_weights(chunk)

    def _fill_window(self, unit: UnitState) -> None:
        """Compute gradients left to pending Ws in an overlap window of this unit: the oldest first, its own last."""
        unit.has_windows = True
        deferred = [one.deferred for one in (*self._pending_units, unit) if one.deferred is not None]
        for _ in range(self._weights_per_window):
            if not any(grads.compute_next() for grads in deferred):
                return

    def _overlap(self, forward: Kind, forward_chunk: int, backward: Kind, backward_chunk: int) -> None:
        """Run a pair in segments. The output is sent as soon as it is there."""
        forwards, backwards = self._states[forward_chunk], self._states[backward_chunk]
        _, number = self._next_action(forward.name, forward_chunk)
        action = forwards.actions[forward.name][number]
        with self._monitor.at(action):
            unit = self._await(forward, forward_chunk, number, action)

        def done() -> None:
            self._store_result(forward, forward_chunk, number, unit)
            forwards.send(forward, number)

        begun = Forward(forwards.stage, unit, next(self._checkpoint_arguments), done)
        _, of_backward = self._next_action(backward.name, backward_chunk)
        other = backwards.actions[backward.name][of_backward]
        with self._monitor.at(other):
            in_flight = self._await(backward, backward_chunk, of_backward, other)
            self._post_large_receives(other)
            run_pair(begun, backwards.stage, backwards.runs["B"], in_flight, self._fill_window)
            self._store_result(backward, backward_chunk, of_backward, in_flight)
        self._monitor.are_overlapped(action, other)


def runs_of(stage: Stage, extensions: Sequence[Extension]) -> dict[str, ActionFunction]:
    """What each kind of action runs on a stage: its method of that name, with what options put around it."""
    runs: dict[str, ActionFunction] = dict(zip(KINDS, attrgetter(*KINDS)(stage)))
    for extension in extensions:
        runs |= extension.kinds(stage)
        stage.forward_step_func = extension.forward_step(stage, stage.forward_step_func)
        for name, run in runs.items():
            runs[name] = extension.action(KINDS[name], stage, run)
    return runs


NO_ARGUMENTS: Iterator[tuple[bool, ...]] = itertools.repeat(())


def checkpoint_arguments(key: PlanKey, pp_rank: int, call: Call) -> Iterator[tuple[bool, ...]]:
    """The third argument of forward_step_func, for each forward of this rank: whether to recompute all activations.
    None where the config asks for nothing; of those in flight at a time the first few recompute only in part."""
    num_partial = call.config.num_microbatches_with_partial_activation_checkpoints
    if num_partial is None or key.pp_size == 1:  # as in Megatron: without a pipeline nothing is in flight at a time
        return NO_ARGUMENTS
    return itertools.cycle([(k >= num_partial,) for k in range(key.plan.peak_in_flight(pp_rank))])
