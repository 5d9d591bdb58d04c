"""The verbs, at work: what is in flight on this rank.

Everything waits in queues, one per chunk and kind, in microbatch order: inputs taken, outputs to be sent, microbatches
between F and B, gradients both ways. A message in a queue is a `Transfer`; the step that needs it waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from ..failures import Position, Watchdog
from ..p2p_communication import Communicator, Transfer
from ..plan import Action, Placement, Settings, Verbs
from ..sharding import ShardedChunks
from ..weight_grad import DeferredGrads
from .boundary import Above, Below, Boundary
from .grad_sync import GradientSync
from .overlapped import Forward, can_overlap, has_hook, may_have_gaps, run_alone, run_pair, run_pair_by_hook
from .rollback import Speculation
from .stage import NOTHING, SavedForward, Stage
from .step_record import StepRecord

__all__ = ["Chunk", "Pipeline"]


class Chunk:
    """One stage of this rank, the boundaries around it, and what waits at it."""

    def __init__(self, stage: Stage, below: Below, above: Above) -> None:
        self.stage = stage
        self.has_gaps = may_have_gaps(stage)
        self.below = below
        self.above = above
        self.inputs: deque[Transfer | None] = deque()
        self.outputs: deque[Transfer | None] = deque()
        self.num_sent_early = 0  # outputs that were sent before the schedule asked for it
        self.num_grads_sent_early = 0  # input gradients too
        self.in_flight: deque[SavedForward] = deque()
        self.output_grads: deque[Transfer | None] = deque()
        self.input_grads: deque[list[Tensor]] = deque()
        self.deferred: deque[tuple[int, DeferredGrads]] = deque()  # with their microbatches

    def keep(self, output: Transfer | None, in_flight: SavedForward | None) -> None:
        """What a forward has made: to be sent, and for its backward."""
        self.outputs.append(output)
        if in_flight is not None:
            self.in_flight.append(in_flight)

    def is_empty(self) -> bool:
        queues = (self.inputs, self.outputs, self.in_flight, self.output_grads, self.input_grads, self.deferred)
        return not any(queues) and self.below.is_empty() and self.above.is_empty()


class Pipeline(Verbs):
    """One step of a pipeline on one rank. A schedule drives it.

    Args:
        communicator, watchdog: None for a pipeline of one rank.
        gradient_sync: None where nothing is trained.
        sharded: the chunks that are sharded by torch's FSDP2, if any.
        partial_checkpoints: (n, window): of every `window` forwards on this rank the first n recompute only in part.
        weight_counts: how many Ws to run before each F and B, in the order of the Bs, wherever the schedule has them;
            the rest at the end. None for the schedule's own places.
        record: where to write down what takes how long; None for nowhere.
        speculation: told before forwards and backwards whose weights may not stand; None where they all do.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        placement: Placement,
        pp_rank: int,
        pp_size: int,
        num_microbatches: int,
        results: list[Any],
        *,
        communicator: Communicator | None,
        watchdog: Watchdog | None,
        gradient_sync: GradientSync | None,
        sharded: ShardedChunks | None,
        partial_checkpoints: tuple[int, int] | None,
        settings: Settings,
        weight_counts: Sequence[int] | None,
        record: StepRecord | None,
        speculation: Speculation | None,
    ) -> None:
        forward_only = gradient_sync is None
        super().__init__(placement, pp_rank, pp_size, num_microbatches, len(chunks), forward_only, settings)
        self._chunks = chunks
        self._results = results
        self._communicator = communicator
        self._watchdog = watchdog
        self._position = Position() if watchdog is None else watchdog.position
        self._gradient_sync = gradient_sync
        self._sharded = sharded
        self._partial_checkpoints = partial_checkpoints
        self._num_forwards = 0
        self._has_waited = False
        self._weight_counts = None if weight_counts is None else iter(weight_counts)
        self._deferred_in: deque[int] = deque()  # the chunks whose Ws are to be run, in the order of the Bs
        self._record = record
        self._speculation = speculation
        self._profiling = torch._C._autograd._profiler_enabled()

    def recv_forward(self, chunk: int = 0) -> None:
        if self._speculation is not None:
            self._speculation.before_recv_forward()
        self._advance("recv_forward", chunk)
        this = self._chunks[chunk]
        this.inputs.append(this.below.take_input())

    def forward_step(self, chunk: int = 0) -> None:
        self._run_weights_due()
        microbatch = self._advance("forward_step", chunk)
        this = self._chunks[chunk]
        with self._at(Action(this.stage.info.index, "F", microbatch)):
            received = self._take_input(chunk, microbatch)
            this.keep(*this.stage.forward(received, microbatch, *self._checkpoint_argument()))

    def send_forward(self, chunk: int = 0) -> None:
        self._advance("send_forward", chunk)
        this = self._chunks[chunk]
        if this.num_sent_early:
            this.num_sent_early -= 1
        else:
            this.above.send_output(this.outputs.popleft())
        this.below.post_ahead()

    def recv_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            if self._speculation is not None:
                self._speculation.before_backward()
            self._advance("recv_backward", chunk)
            this = self._chunks[chunk]
            this.output_grads.append(this.above.take_gradient())

    def backward_step(self, chunk: int = 0) -> None:
        if self._gradient_sync is None:
            return
        self._run_weights_due()
        microbatch = self._advance_backward(chunk, deferred=False)
        this = self._chunks[chunk]
        with self._at(Action(this.stage.info.index, "BW", microbatch)):
            grads = self._wait_for_gradient(this, microbatch)
            if this.has_gaps:
                deferred = DeferredGrads()
                this.input_grads.append(run_alone(this.stage, this.in_flight.popleft(), grads, deferred))
                self._end_backward(chunk, deferred)
            else:
                with self._around_gradients(chunk):
                    this.input_grads.append(this.stage.backward(this.in_flight.popleft(), grads))

    def backward_input_step(self, chunk: int = 0) -> None:
        if self.forward_only:
            return
        self._run_weights_due()
        microbatch = self._advance_backward(chunk, deferred=True)
        this = self._chunks[chunk]
        with self._at(Action(this.stage.info.index, "B", microbatch)):
            grads = self._wait_for_gradient(this, microbatch)
            deferred = DeferredGrads()
            this.input_grads.append(this.stage.backward(this.in_flight.popleft(), grads, deferred))
            this.deferred.append((microbatch, deferred))
        if self._weight_counts is not None:
            self._deferred_in.append(chunk)

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        forward, backward = self._chunks[forward_chunk], self._chunks[backward_chunk]
        if self.forward_only or not can_overlap(forward.stage, backward.stage):
            self.forward_step(forward_chunk)
            if len(forward.outputs) == 1:  # and none that is to be sent before it
                self._send_early(forward)
            self.backward_step(backward_chunk)
            return
        for _ in range(2):  # the places before either
            self._run_weights_due()
        begun = self._begin_forward(forward_chunk)
        microbatch = self._advance_backward(backward_chunk, deferred=False)
        action = Action(backward.stage.info.index, "BW", microbatch)
        if self._record is not None:
            self._record.overlapped |= {action, Action(forward.stage.info.index, "F", begun.microbatch)}
        with self._at(action):
            grads = self._wait_for_gradient(backward, microbatch)
            if has_hook(forward.stage, backward.stage):
                with self._around_gradients(backward_chunk):
                    backward.input_grads.append(
                        run_pair_by_hook(begun, backward.stage, backward.in_flight.popleft(), grads)
                    )
                return
            deferred = DeferredGrads()
            backward.input_grads.append(run_pair(begun, backward.stage, backward.in_flight.popleft(), grads, deferred))
            self._end_backward(backward_chunk, deferred)

    def _end_backward(self, chunk: int, deferred: DeferredGrads) -> None:
        """Send the input gradients of the backward just run in parts, and then run its W, which nobody waits for: pairs
        of neighbours run in step, each in need of what the other's has just made."""
        this = self._chunks[chunk]
        if len(this.input_grads) == 1:
            this.below.send_gradient(this.input_grads.popleft())
            this.num_grads_sent_early += 1
        with self._around_gradients(chunk, in_w=True):
            this.stage.backward_weights(deferred)
            if self._sharded is not None:
                self._sharded.after_weights(chunk)

    def _begin_forward(self, chunk: int) -> Forward:
        """The forward of an overlapped pair, up to where it is to be run. When done, it is sent at once."""
        microbatch = self._advance("forward_step", chunk)
        this = self._chunks[chunk]

        def done(kept: tuple[Transfer | None, SavedForward | None]) -> None:
            this.keep(*kept)
            if len(this.outputs) == 1:
                self._send_early(this)

        with self._at(Action(this.stage.info.index, "F", microbatch)):
            received = self._take_input(chunk, microbatch)
            return Forward(this.stage, received, microbatch, self._checkpoint_argument(), done)

    def _take_input(self, chunk: int, microbatch: int) -> Transfer | None:
        """The input of a forward that is about to be run, arrived."""
        if self._sharded is not None:
            self._sharded.before_forward(chunk, microbatch)
        if self._gradient_sync is not None:
            self._gradient_sync.before_forward(chunk, microbatch, self.num_backwards_left(chunk))
        this = self._chunks[chunk]
        received = this.inputs.popleft()
        if received is not None:
            self._wait(received, "the forward input", microbatch, this.below)
        return received

    def _send_early(self, chunk: Chunk) -> None:
        chunk.above.send_output(chunk.outputs.popleft())
        chunk.num_sent_early += 1

    def backward_weight_step(self, chunk: int | None = None) -> None:
        if not self.forward_only:
            chunk, _ = self._advance_weight(chunk)
            if self._weight_counts is None:
                self._run_weights(chunk)

    def _run_weights_due(self) -> None:
        """The Ws that have been given their place before the next F or B."""
        if self._weight_counts is not None:
            for _ in range(next(self._weight_counts)):
                self._run_weights(self._deferred_in.popleft())

    def _run_weights(self, chunk: int) -> None:
        this = self._chunks[chunk]
        microbatch, deferred = this.deferred.popleft()
        with self._at(Action(this.stage.info.index, "W", microbatch)), self._around_gradients(chunk, in_w=True):
            this.stage.backward_weights(deferred)
            if self._sharded is not None:
                self._sharded.after_weights(chunk)

    def _around_gradients(self, chunk: int, in_w: bool = False) -> AbstractContextManager[Any]:
        """Around what may be the last to come to the gradients of the chunk."""
        assert self._gradient_sync is not None
        if self.num_backwards_left(chunk) or self._chunks[chunk].deferred:
            return NOTHING
        return self._gradient_sync.last_gradients(chunk, in_w)

    def send_backward(self, chunk: int = 0) -> None:
        if not self.forward_only:
            self._advance("send_backward", chunk)
            this = self._chunks[chunk]
            if this.num_grads_sent_early:
                this.num_grads_sent_early -= 1
            else:
                this.below.send_gradient(this.input_grads.popleft())
            this.above.post_ahead()

    def finish(self) -> list[Any]:
        """Wait until everything sent has been taken. Returns what the loss function reported."""
        self._check_finished()
        while self._deferred_in:
            self._run_weights(self._deferred_in.popleft())
        assert all(chunk.is_empty() for chunk in self._chunks), "the schedule ended with work left in its queues"
        for chunk in self._chunks:
            chunk.stage.forget_input()
        if self._communicator is not None:
            self._position.action, self._position.peer = "the end of its step", None
            self._position.awaited = "its last messages to be taken"
            since = None if self._record is None else self._record.now()
            self._communicator.drain()
            if self._record is not None:
                self._record.waited(since)
            self._position.awaited = None
            self._check_failures()
        return self._results

    def discard_forwards(self, num_sent: Mapping[int, int]) -> None:
        """Take what other ranks send to forwards that do not count, so that the step can begin again over the same
        boundaries.

        Args:
            num_sent: by stage, the outputs that it sends in vain.
        """
        for chunk in self._chunks:
            to_come = [transfer for transfer in chunk.inputs if transfer is not None]
            to_come += chunk.below.discard_inputs(num_sent[chunk.stage.info.index - 1])
            for transfer in to_come:
                self._wait(transfer, "an input that does not count", 0, chunk.below)
            chunk.above.discard_outputs()
        if self._communicator is not None:
            self._communicator.begin_again()

    def _wait_for_gradient(self, chunk: Chunk, microbatch: int) -> list[Tensor] | None:
        received = chunk.output_grads.popleft()
        return None if received is None else self._wait(received, "the output gradient", microbatch, chunk.above)

    def _wait(self, transfer: Transfer, what: str, microbatch: int, boundary: Boundary) -> list[Tensor]:
        """Wait for a message. Whoever wonders what this rank is doing meanwhile finds it in its position."""
        position = self._position
        position.peer = boundary.peer
        position.awaited = f"{what} of microbatch {microbatch}"
        since = None if self._record is None else self._record.now()
        if not self._has_waited:  # that is while the pipeline fills, so there is time
            self._has_waited = True
            for chunk in self._chunks:
                chunk.below.post_all()
                chunk.above.post_all()
        is_reached = None if self._communicator is None or boundary.peer is None else self._communicator.mark()
        tensors = transfer.wait()
        if is_reached is not None and self._watchdog is not None:
            self._watchdog.device_waits.add(replace(position), is_reached, transfer.has_arrived)
        if self._record is not None:
            self._record.waited(since)
        position.awaited = None
        self._check_failures()
        return tensors

    def _check_failures(self) -> None:
        if self._watchdog is not None:
            self._watchdog.check()

    def _at(self, action: Action) -> AbstractContextManager[Any]:
        self._check_failures()
        self._position.action = action
        profiled = record_function(str(action)) if self._profiling else NOTHING
        return profiled if self._record is None else self._record.during(action, profiled)

    def _checkpoint_argument(self) -> tuple[bool, ...]:
        """The third argument of forward_step_func: whether to recompute all of this forward's activations."""
        if self._partial_checkpoints is None:
            return ()
        num_partial, window = self._partial_checkpoints
        forward, self._num_forwards = self._num_forwards, self._num_forwards + 1
        return (forward % window >= num_partial,)
