"""The verbs, at work: what is in flight on this rank.

Everything waits in queues, one per chunk and kind, in microbatch order: inputs taken, outputs to be sent, microbatches
between F and B, gradients both ways. A message in a queue is a `Transfer`; the step that needs it waits for it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import Tensor

from ..p2p_communication import Transfer
from ..plan import Action, Verbs, unit_in_words
from ..weight_grad import DeferredGrads, unshared
from .arguments import StepArguments
from .boundary import Above, Below
from .grad_sync import GradientSync
from .monitor import Monitor
from .overlapped import Forward, can_overlap, has_hook, run_alone, run_pair, run_pair_by_hook
from .plans import PlanKey
from .rollback import Speculation
from .stage import NOTHING, SavedForward, Stage

__all__ = ["Chunk", "Pipeline", "checkpoint_arguments"]

RunBackward = Callable[[SavedForward, "list[Tensor] | None", "DeferredGrads | None"], "list[Tensor]"]
"""Called with the saved forward, the gradients of its outputs (None on the last stage), and where to put weight
gradients that are deferred (None for nowhere). Returns the gradients of the inputs."""


class Chunk:
    """One stage of this rank, the boundaries around it, and what waits at it.

    Args:
        actions: by kind, those of the stage in this step, in its order.
    """

    def __init__(self, stage: Stage, below: Below, above: Above, actions: Mapping[str, Sequence[Action]]) -> None:
        self.stage = stage
        self.index = stage.info.index
        self.actions = actions
        self.below = below
        self.above = above
        self.inputs: deque[Transfer | None] = deque()
        self.outputs: deque[Transfer | None] = deque()
        self.num_outputs_sent = 0
        self.in_flight: deque[SavedForward] = deque()
        self.output_grads: deque[Transfer | None] = deque()
        self.input_grads: deque[list[Tensor]] = deque()
        self.num_input_grads_sent = 0
        self.deferred: deque[tuple[int, DeferredGrads]] = deque()  # with the numbers of their Bs

    def keep(self, made: tuple[Transfer | None, SavedForward | None]) -> None:
        """What a forward has made: to be sent, and for its backward."""
        output, in_flight = made
        if output is not None:  # which the forward itself no longer holds
            output.tensors = [unshared(tensor) for tensor in output.tensors]
        self.outputs.append(output)
        if in_flight is not None:
            self.in_flight.append(in_flight)

    def send_output(self, number: int) -> None:
        """Send it, unless that has been done, or others are to be sent before it."""
        if number == self.num_outputs_sent:
            self.num_outputs_sent += 1
            self.above.send_output(self.outputs.popleft())

    def send_input_grads(self, number: int) -> None:
        """Send them, unless that has been done, or others are to be sent before them."""
        if number == self.num_input_grads_sent:
            self.num_input_grads_sent += 1
            self.below.send_gradient(self.input_grads.popleft())

    def take_in_flight(self, part: int) -> SavedForward:
        """For the next backward: the oldest microbatch, or a slice of it, those behind which are gone already."""
        saved = self.in_flight[part]
        del self.in_flight[part]
        return saved

    def is_empty(self) -> bool:
        queues = (self.inputs, self.outputs, self.in_flight, self.output_grads, self.input_grads, self.deferred)
        return not any(queues) and self.below.is_empty() and self.above.is_empty()


class Pipeline(Verbs):
    """One step of a pipeline on one rank. A schedule drives it.

    Args:
        key: of the plan that the schedule follows.
        sync: told when gradients become complete.
        speculation: told before forwards and backwards whose weights may not stand; None where they all do.
    """

    def __init__(
        self,
        key: PlanKey,
        pp_rank: int,
        chunks: Sequence[Chunk],
        step: StepArguments,
        sync: GradientSync,
        monitor: Monitor,
        speculation: Speculation | None = None,
    ) -> None:
        super().__init__(key.schedule.placement, pp_rank, *key[1:4], step.forward_only, key.settings, key.num_slices)
        self._chunks = chunks
        self._results = step.results
        self._sync = sync
        self._monitor = monitor
        self._speculation = speculation
        self._checkpoint_arguments = checkpoint_arguments(key, pp_rank, step)
        self._has_waited = False

    # Messages

    def recv_forward(self, chunk: int = 0) -> None:
        if self._speculation is not None:
            self._speculation.before_recv_forward()
        self._advance("recv_forward", chunk)
        this = self._chunks[chunk]
        this.inputs.append(this.below.take_input())

    def send_forward(self, chunk: int = 0) -> None:
        number = self._advance("send_forward", chunk)
        this = self._chunks[chunk]
        this.send_output(number)
        this.below.post_ahead()

    def recv_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            if self._speculation is not None:
                self._speculation.before_backward()
            self._advance("recv_backward", chunk)
            this = self._chunks[chunk]
            this.output_grads.append(this.above.take_gradient())

    def send_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            number = self._advance("send_backward", chunk)
            this = self._chunks[chunk]
            this.send_input_grads(number)
            this.above.post_ahead()

    # Computations

    def forward_step(self, chunk: int = 0) -> None:
        number = self._advance("forward_step", chunk)
        this = self._chunks[chunk]
        action = this.actions["F"][number]
        with self._monitor.at(action):
            received = self._begin_forward(chunk, number, action)
            this.keep(this.stage.forward(received, action.microbatch, *next(self._checkpoint_arguments)))

    def backward_step(self, chunk: int = 0) -> None:
        if not self.forward_only:
            this = self._chunks[chunk]
            if this.in_flight and this.in_flight[0].has_windows:
                self._run_backward(chunk, "BW", partial(run_alone, this.stage), DeferredGrads())
            else:
                self._run_backward(chunk, "BW", this.stage.backward)

    def backward_input_step(self, chunk: int = 0) -> None:
        if not self.forward_only:
            self._run_backward(chunk, "B", self._chunks[chunk].stage.backward, DeferredGrads())

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        forward, backward = self._chunks[forward_chunk], self._chunks[backward_chunk]
        if self.forward_only or self.num_slices > 1 or not can_overlap(forward.stage, backward.stage):
            self.forward_step(forward_chunk)
            forward.send_output(self.num_units - self.num_forwards_left(forward_chunk) - 1)
            self.backward_step(backward_chunk)
            return
        begun = self._begin_overlapped_forward(forward_chunk)
        if has_hook(forward.stage, backward.stage):
            action = self._run_backward(
                backward_chunk, "BW", lambda *args: run_pair_by_hook(begun, backward.stage, *args[:2])
            )
        else:
            run = partial(run_pair, begun, backward.stage)
            action = self._run_backward(backward_chunk, "BW", run, DeferredGrads())
        self._monitor.are_overlapped(forward.actions["F"][begun.microbatch], action)

    def backward_weight_step(self, chunk: int | None = None) -> None:
        if not self.forward_only:
            chunk, _ = self._advance_weight(chunk)
            self._run_weights(chunk)

    def finish(self) -> list[Any]:
        """Wait until everything sent has been taken. Returns what the loss function reported."""
        self._check_finished()
        assert all(chunk.is_empty() for chunk in self._chunks), "the schedule ended with work left in its queues"
        for chunk in self._chunks:
            chunk.stage.forget_input()
        self._monitor.drain()
        return self._results

    def discard_forwards(self, num_sent: Mapping[int, int]) -> None:
        """After a rollback: take the messages that other ranks send until they roll back too, so that the step can be
        run again over the same boundaries.

        Args:
            num_sent: by stage, the outputs that it sends until then.
        """
        for chunk in self._chunks:
            to_come = [transfer for transfer in chunk.inputs if transfer is not None]
            to_come += chunk.below.discard_inputs(num_sent[chunk.index - 1])
            for transfer in to_come:
                self._wait(transfer, "an input to be discarded", chunk.actions["F"][0], chunk.below.peer)
            chunk.above.discard_outputs()

    # What forwards, overlapped or not, have in common

    def _begin_overlapped_forward(self, chunk: int) -> Forward:
        """The forward of an overlapped pair, up to where it is to be run. When done, it is sent at once."""
        microbatch = self._advance("forward_step", chunk)
        this = self._chunks[chunk]

        def done(made: tuple[Transfer | None, SavedForward | None]) -> None:
            this.keep(made)
            this.send_output(microbatch)

        action = this.actions["F"][microbatch]
        with self._monitor.at(action):
            received = self._begin_forward(chunk, microbatch, action)
            return Forward(this.stage, received, microbatch, next(self._checkpoint_arguments), done)

    def _begin_forward(self, chunk: int, number: int, action: Action) -> Transfer | None:
        """Wait for the input of a forward that is about to be run, and for its parameters."""
        self._sync.before_forward(chunk, number, self.num_backwards_left(chunk))
        this = self._chunks[chunk]
        received = this.inputs.popleft()
        if received is not None:
            self._wait(received, "the forward input", action, this.below.peer)
        return received

    # One way to run a backward

    def _run_backward(self, chunk: int, kind: str, run: RunBackward, deferred: DeferredGrads | None = None) -> Action:
        """Run the next backward of `chunk`.

        Args:
            deferred: collects what is left to W. With "BW" that is run here too, behind the sending of the input
                gradients, for which a neighbour may wait.
        """
        number = self._advance_backward(chunk, deferred=kind == "B")
        this = self._chunks[chunk]
        action = this.actions[kind][number]
        with self._monitor.at(action):
            received = this.output_grads.popleft()
            output_grads = None
            if received is not None:
                output_grads = self._wait(received, "the output gradient", action, this.above.peer)
            with self._around_gradients(chunk) if deferred is None else NOTHING:
                this.input_grads.append(run(this.take_in_flight(action.slice), output_grads, deferred))
            if deferred is not None and kind == "B":
                this.deferred.append((number, deferred))
            elif deferred is not None:
                this.send_input_grads(number)
                self._compute_deferred(chunk, deferred)
        return action

    def _run_weights(self, chunk: int) -> None:
        this = self._chunks[chunk]
        number, deferred = this.deferred.popleft()
        with self._monitor.at(this.actions["W"][number]):
            self._compute_deferred(chunk, deferred)

    def _compute_deferred(self, chunk: int, deferred: DeferredGrads) -> None:
        with self._around_gradients(chunk, in_w=True):
            self._chunks[chunk].stage.backward_weights(deferred)
            self._sync.after_weights(chunk)

    def _around_gradients(self, chunk: int, in_w: bool = False) -> AbstractContextManager[Any]:
        """Around the computation that may complete the gradients of the chunk."""
        if self.num_backwards_left(chunk) or self._chunks[chunk].deferred:
            return NOTHING
        return self._sync.last_gradients(chunk, in_w)

    def _wait(self, transfer: Transfer, what: str, action: Action, peer: int | None) -> list[Tensor]:
        if not self._has_waited:  # that is while the pipeline fills, so there is time
            self._has_waited = True
            for chunk in self._chunks:
                chunk.below.post_all()
                chunk.above.post_all()
        unit = unit_in_words(action.microbatch, action.slice, self.num_slices)
        return self._monitor.wait(transfer, f"{what} of {unit}", peer)


def checkpoint_arguments(key: PlanKey, pp_rank: int, step: StepArguments) -> Iterator[tuple[bool, ...]]:
    """For each forward of this rank the third argument of forward_step_func, whether to recompute all activations, or
    none where the config asks for nothing: of those in flight at a time the first few recompute only in part."""
    num_partial = step.config.num_microbatches_with_partial_activation_checkpoints
    if num_partial is None or key.pp_size == 1:  # as in Megatron: without a pipeline nothing is in flight at a time
        return itertools.repeat(())
    return itertools.cycle([(k >= num_partial,) for k in range(key.plan.peak_in_flight(pp_rank))])
