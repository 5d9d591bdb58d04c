"""Implements `Verbs` with real computation and messages, for one rank. The object that a schedule is called with.

A unit (a microbatch, or a slice of one) is made when its forward begins, handed to its stage for each action, and
dropped after its last one. Messages wait in the links until an action takes them or the schedule sends them.
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
from ..stages import ActionFunction, Call, Extension, Half, Stage, UnitState, run_overlapped
from .first_step import FirstStep
from .grad_sync import GradientSync
from .monitor import Monitor
from .plans import PlanKey


class Links(NamedTuple):
    """The four links of a stage. None at the ends: the first stage reads data_iterator, and the backward of the last
    one begins at its loss."""

    inputs: Link | None
    """Arrive from the previous stage."""
    outputs: Link | None
    """Leave for the next stage."""
    output_grads: Link | None
    """Arrive from the next stage."""
    input_grads: Link | None
    """Leave for the previous stage."""


class StageState:
    """What a pipeline has of one stage of this rank: its links, its units in flight, and the functions of its actions.

    Args:
        actions: all actions that the stage can run in a step, by the name of their kind.

    Attributes:
        stage, functions, first_step: of the current step; they are there from `reset` to `end`.
    """

    stage: Stage
    functions: dict[str, ActionFunction]
    """The function that runs each kind of action, by the name of the kind. It is called with a unit."""
    first_step: FirstStep | None
    """Observes the stage in its first step; None in later ones."""

    def __init__(self, actions: Mapping[str, Sequence[Action]], links: Links) -> None:
        self.actions = actions
        self.inputs, self.outputs, self.output_grads, self.input_grads = links
        self.links = [link for link in links if link is not None]
        self.receivers = [link for link in (links.output_grads, links.inputs) if link and link.peer is not None]
        self.kinds_with_message = {
            name
            for name, kind in KINDS.items()
            if kind.direction is not None and (self.inputs if kind.is_forward else self.output_grads) in self.receivers
        }
        """Kinds of action whose message comes from another rank."""
        self.may_have_windows = {name for name, kind in KINDS.items() if kind.direction is not None}
        """Kinds of action that may have overlap windows (`megapipe.overlap`): points at which the model waits for
        communication, and weight gradients can be computed meanwhile. A kind is taken out after a step in which no unit
        had had a window by the end of its action."""
        self.had_windows: dict[str, bool] = {}
        """Whether a unit had a window in this step, in an action of this kind or an earlier one."""
        self.units: dict[tuple[int, int], UnitState] = {}
        """Units in flight, by microbatch and slice."""

    def reset(self, stage: Stage, functions: dict[str, ActionFunction], first_step: FirstStep | None) -> None:
        """Called when a step begins."""
        self.stage, self.functions, self.first_step = stage, functions, first_step
        self.had_windows.clear()
        self.units.clear()
        for link in self.links:
            link.reset()
        if self.inputs is not None:  # gradients come after the first forward has been sent
            self.inputs.post_lookahead()

    def end(self) -> None:
        """Called when all actions of a step have run. Drops what refers to the model. After a failed step the whole
        pipeline is dropped."""
        assert not self.units, "the schedule ended with work left"
        for link in self.links:
            assert link.is_empty(), "the schedule ended with messages left"
        for name, had_some in self.had_windows.items():
            if not had_some:
                self.may_have_windows.discard(name)
        self.stage.forget_input()
        del self.stage, self.functions, self.first_step

    def send(self, kind: Kind, number: int) -> None:
        """Send the result of action `number` of a kind now; the schedule's later `send_forward` or `send_backward` then
        does nothing. Does nothing itself if an earlier result is not sent yet."""
        link = self.outputs if kind.is_forward else self.input_grads
        if link is not None:
            link.send(number)


class Pipeline(Verbs):
    """One rank's implementation of the verbs, used for all steps of a runner with the same number of microbatches.

    `Verbs` (plan/verbs.py) has `forward_step`, `backward_step` and the like: they count the actions of each chunk, and
    call `run`. The same counts make a plan when a schedule is recorded.

    Args:
        key: of the plan that the schedule follows.
        links: of each stage of the rank.
        posted_ahead: before which action which large receives are posted (`Runner._posted_ahead`).
    """

    _monitor: Monitor
    _sync: GradientSync | None
    """Calls no_sync_func, grad_sync_func and param_sync_func; None if there is none to call
    (`Runner._gradient_sync`)."""

    def __init__(
        self,
        key: PlanKey,
        pp_rank: int,
        links: Sequence[Links],
        forward_only: bool,
        posted_ahead: Mapping[Action, Sequence[Action]],
    ) -> None:
        sizes = (key.pp_size, key.num_microbatches, key.num_chunks)
        super().__init__(key.schedule.placement, pp_rank, *sizes, forward_only, key.settings, key.num_slices)
        self._states = [
            StageState(actions_of(info.index, self.num_microbatches, self.num_slices), around)
            for info, around in zip(self.stages, links)
        ]
        self._posted_ahead = posted_ahead
        self._recomputed = frozenset() if forward_only else key.recomputed(pp_rank)  # Fs whose activations R computes
        units = itertools.product(range(self.num_microbatches), range(self.num_slices))
        self._in_words = {unit: unit_in_words(*unit, self.num_slices) for unit in units}
        self._pending_units: dict[UnitState, None] = {}
        """Units whose B has run and whose W has not, oldest first."""

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
        """Called before the schedule's loops: set counters to 0, and take what this step runs.

        Args:
            stages, first_steps: one per chunk.
            checkpoint_arguments: gives the third argument of forward_step_func for each forward (Megatron's
                checkpoint_activations_microbatch).
        """
        self.reset()
        self._results, self._monitor, self._sync = call.results, monitor, sync
        self._checkpoint_arguments = checkpoint_arguments
        self._weights_per_window = 0 if self.forward_only else call.config.weights_per_window
        self._has_waited = False
        self._pending_units.clear()
        for state, stage, first_step in zip(self._states, stages, first_steps):
            state.reset(stage, self._functions(state, stage, extensions), first_step)

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
        """Run the R of the chunk's next backward, if its activations are recomputed and the R has not run yet."""
        if self._recomputed and self.num_backwards_left(chunk):
            number = self._counts["backward_step"][chunk]
            action = self._states[chunk].actions[RECOMPUTE.name][number]
            if (
                action._replace(kind=FORWARD.name) in self._recomputed
                and self._next_optional(RECOMPUTE.name, chunk) == number
            ):
                self.run(RECOMPUTE.name, chunk)

    def run(self, kind_name: str, chunk: int | None = 0, number: int | None = None) -> None:
        """Run one action: wait for its message, call its function, and keep its result for sending.

        Args:
            chunk: None for W takes the chunk whose pending W is the oldest.
            number: which of the chunk's actions of this kind; None takes the next one.
        """
        kind = KINDS[kind_name]
        if self.forward_only and not kind.is_forward:
            return
        chunk, number = self._next_action(kind_name, chunk, number)
        state = self._states[chunk]
        action = state.actions[kind_name][number]
        with self._monitor.at(action):
            if not self._has_waited and kind_name in state.kinds_with_message:
                self._post_while_idle()
            unit = self._await(kind, chunk, number, action)
            if self._posted_ahead:
                self._post_large_receives(action)
            if kind_name in state.may_have_windows and self._weights_per_window:
                with filling_windows(partial(self._fill_window, unit)):
                    state.functions[kind_name](unit)
                state.had_windows[kind_name] = state.had_windows.get(kind_name, False) or unit.has_windows
            else:
                state.functions[kind_name](unit)
            self._store_result(kind, chunk, number, unit)

    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        """Run two actions, each given as (kind, chunk), that may overlap: an F followed by a backward does, if the
        model's forward runs in segments and sequences are not cut into slices. Otherwise one runs after the other, and
        the result of the first is sent before the second begins, as in the plan."""
        (name, chunk), (other_name, other_chunk) = first, second
        kind, other = KINDS[name], KINDS[other_name]
        is_overlapped = (kind.direction, other.direction) == ("forward", "backward") and self.num_slices == 1
        if is_overlapped and not self.forward_only and self._states[chunk].stage.can_overlap:
            self._overlap(kind, chunk, other, other_chunk)
            return
        self.run(name, chunk)
        if kind.is_forward or (kind.direction is not None and not self.forward_only):
            self._states[chunk].send(kind, self._counts[self._verbs[name]][chunk] - 1)
        self.run(other_name, other_chunk)

    def finish(self) -> list[Any]:
        """End the step: check that nothing is left to do, and wait for sends that the host must complete (gloo, and
        headers).

        Returns:
            The reports of the loss function, in microbatch order.

        Raises:
            ScheduleError: the schedule left out an action or a message.
            ConnectionLostError: a send failed.
        """
        self._check_finished()
        for state in self._states:
            state.end()
        self._monitor.drain()
        results, self._results, self._sync = self._results, [], None  # results and sync refer to the models
        return results

    # The parts of an action

    def _await(self, kind: Kind, chunk: int, number: int, action: Action) -> UnitState:
        """Wait for the message that an action needs, if it needs one. Returns the unit of the action, with the message
        in it. Over NCCL it is the device that waits, but for headers."""
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
        """Called once in a step, before the first action of this rank whose message comes from another one: post more
        receives, as far as the lookahead's `idle_bytes` allow. A rank with nothing else to do has the time."""
        self._has_waited = True
        for state in self._states:
            for receiver in state.receivers:
                receiver.post_while_idle()

    def _post_large_receives(self, action: Action) -> None:
        """Called before an action, after the wait for its own message: post the large receives of the next action, if
        no rank can then wait for ever, by the plan (NCCL only; plan/early_receives.py)."""
        for later in self._posted_ahead.get(action, ()):
            state = self._states[later.stage // self.pp_size]
            link = state.inputs if KINDS[later.kind].is_forward else state.output_grads
            if link is not None:
                link.post_early()

    def _store_result(self, kind: Kind, chunk: int, number: int, unit: UnitState) -> None:
        """Called after an action: queue its result for sending, and drop the unit after its last action.

        A BW that had overlap windows has left weight gradients to be computed: its input gradients are sent first,
        since a neighbour may wait for them."""
        state = self._states[chunk]
        if state.first_step is not None:
            state.first_step.observe(unit)
        if kind.is_forward:
            output, unit.output = unit.output, None
            if state.outputs is not None:
                assert output is not None
                # Here, where the unit does not refer to the output any more: only what the model still refers to is
                # copied.
                for index, tensor in enumerate(output.tensors):
                    output.tensors[index] = unshared(tensor)
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
                state.functions[WEIGHTS.name](unit)
            del self._pending_units[unit]
        if kind.completes_weights or self.forward_only:
            del state.units[unit.microbatch, unit.slice]

    # The functions of actions

    def _functions(self, state: StageState, stage: Stage, extensions: Sequence[Extension]) -> dict[str, ActionFunction]:
        """The function of each kind of action of a stage in this step."""
        functions = action_functions(stage, extensions)
        if self._checkpoint_arguments is not NO_ARGUMENTS:
            forward = functions[FORWARD.name]
            # `own`: `_overlap` passes the argument itself, since it calls this several times for one forward.
            functions[FORWARD.name] = lambda unit, *own: forward(unit, *(own or next(self._checkpoint_arguments)))
        if self._sync is not None:
            for name, kind in KINDS.items():
                if kind.completes_weights:
                    functions[name] = partial(self._run_and_sync, self._states.index(state), functions[name], kind)
        return functions

    def _run_and_sync(self, chunk: int, run: ActionFunction, kind: Kind, unit: UnitState) -> None:
        """Run an action that may complete the gradients of a chunk. If it does, `GradientSync` is told."""
        assert self._sync is not None
        if kind.direction is not None and unit.has_windows:  # a BW, whose W `_store_result` runs
            run(unit)
            return
        # `run` and `_overlap` have counted this action already.
        is_last_action = not self.num_backwards_left(chunk) and not self.num_pending_weights(chunk)
        is_w = unit.deferred is not None
        with self._sync.last_gradients(chunk, is_w) if is_last_action else nullcontext():
            run(unit)
            if is_w:
                self._sync.after_weights(chunk)

    def _fill_window(self, unit: UnitState) -> None:
        """Called in an overlap window of `unit`: compute some deferred weight gradients, `weights_per_window` of them.
        Those of the oldest pending W come first, those of this unit last."""
        unit.has_windows = True
        deferred = [one.deferred for one in (*self._pending_units, unit) if one.deferred is not None]
        for _ in range(self._weights_per_window):
            if not any(grads.compute_next() for grads in deferred):
                return

    def _overlap(self, forward: Kind, forward_chunk: int, backward: Kind, backward_chunk: int) -> None:
        """Run a pair in segments. The output of the forward is sent as soon as it is computed."""
        forwards, backwards = self._states[forward_chunk], self._states[backward_chunk]
        _, number = self._next_action(forward.name, forward_chunk)
        action = forwards.actions[forward.name][number]
        with self._monitor.at(action):
            unit = self._await(forward, forward_chunk, number, action)

        def done() -> None:
            self._store_result(forward, forward_chunk, number, unit)
            forwards.send(forward, number)

        first = Half(forwards.stage, forwards.functions[forward.name], unit)
        extra = next(self._checkpoint_arguments)
        _, of_backward = self._next_action(backward.name, backward_chunk)
        other = backwards.actions[backward.name][of_backward]
        with self._monitor.at(other):
            in_flight = self._await(backward, backward_chunk, of_backward, other)
            self._post_large_receives(other)
            # A BW is run as B: `_store_result` runs its W, after it has sent the input gradients.
            second = Half(backwards.stage, backwards.functions["B"], in_flight)
            run_overlapped(first, extra, done, second, self._fill_window)
            self._store_result(backward, backward_chunk, of_backward, in_flight)
        self._monitor.are_overlapped(action, other)


def action_functions(stage: Stage, extensions: Sequence[Extension]) -> dict[str, ActionFunction]:
    """The function of each kind of action on a stage, by the kind's name: the stage's method of that name, or what an
    extension puts in its place, wrapped by all extensions. They also wrap the stage's forward_step_func. The last
    extension is outermost."""
    functions: dict[str, ActionFunction] = dict(zip(KINDS, attrgetter(*KINDS)(stage)))
    for extension in extensions:
        functions |= extension.kinds(stage)
    for extension in extensions:
        stage.forward_step_func = extension.forward_step(stage, stage.forward_step_func)
        for name, run in functions.items():
            functions[name] = extension.action(KINDS[name], stage, run)
    return functions


NO_ARGUMENTS: Iterator[tuple[bool, ...]] = itertools.repeat(())


def checkpoint_arguments(key: PlanKey, pp_rank: int, call: Call) -> Iterator[tuple[bool, ...]]:
    """Gives the third argument of forward_step_func for each forward of this rank, in order (Megatron's
    checkpoint_activations_microbatch): True to checkpoint all activations, False for a part of them. Gives () each time
    if the config asks for no such argument, or on one rank."""
    num_partial = call.config.num_microbatches_with_partial_activation_checkpoints
    if num_partial is None or key.pp_size == 1:  # as in Megatron: one rank has one microbatch in flight
        return NO_ARGUMENTS
    return itertools.cycle([(k >= num_partial,) for k in range(key.plan.peak_in_flight(pp_rank))])
