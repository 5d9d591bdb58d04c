"""The interface of schedules: the methods that a schedule calls to run actions and to send and receive messages
("verbs"), and the numbers that it may ask for.

A schedule is a function of one argument, a `Verbs`. Two classes implement it: `Pipeline` computes and communicates,
`PlanRecorder` writes the calls down as a plan. So the hand-written loop is the only source of truth for both.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

from .kinds import KINDS, Kind
from .placement import Placement

# The verbs that each microbatch goes through on a chunk, in this order. B and BW both count as "backward_step", since
# a microbatch has one of them. A pair counts as one forward_step and one backward_step.
VERBS_IN_ORDER = ("recv_forward", "forward_step", "send_forward", "recv_backward", "backward_step", "send_backward")


class ScheduleError(ValueError):
    """A schedule calls verbs in an order that cannot work."""


class Action(NamedTuple):
    """One computation. `2F0` is the forward of microbatch 0 on stage 2, `2B0` its backward, `2W0` its deferred weight
    gradients. If sequences are cut into slices, `2F0` is the forward of the first slice and `2F0.1` of the second."""

    stage: int
    kind: str
    """"F"; "BW" for a backward that computes input and weight gradients together; "B" and "W" for its two parts
    (kinds.py)."""
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        return f"{self.stage}{self.kind[0]}{self.unit}"

    @property
    def unit(self) -> str:
        """The microbatch and the slice: `0`, or `0.1`."""
        return unit_name(self.microbatch, self.slice)


def actions_of(stage: int, num_microbatches: int, num_slices: int) -> dict[str, list[Action]]:
    """Actions that a stage can run in a step, by kind, in the order in which it runs them. Not to be changed: all steps
    of these sizes share them."""
    return {
        name: _actions_of_kind(name, kind.is_forward, stage, num_microbatches, num_slices)
        for name, kind in KINDS.items()
    }


@functools.lru_cache(maxsize=256)
def _actions_of_kind(name: str, is_forward: bool, stage: int, num_microbatches: int, num_slices: int) -> list[Action]:
    units = (divmod(number, num_slices) for number in range(num_microbatches * num_slices))
    return [
        Action(stage, name, microbatch, part if is_forward else num_slices - 1 - part) for microbatch, part in units
    ]


def unit_name(microbatch: int, slice: int) -> str:
    return f"{microbatch}.{slice}" if slice else str(microbatch)


def unit_in_words(microbatch: int, slice: int, num_slices: int) -> str:
    """A unit in words, for error texts."""
    return f"microbatch {microbatch}" if num_slices == 1 else f"slice {slice} of microbatch {microbatch}"


@dataclass(frozen=True)
class Settings:
    """Settings of schedules, the same on all ranks. A schedule ignores those that it does not use.

    Attributes:
        microbatch_group_size: how many microbatches interleaved schedules run through a chunk before they turn to the
            next; None for the smallest that works (ranks / slices), or the largest that `max_in_flight` allows.
        max_in_flight: the most that any rank may have in flight, from F to W: 1.0 is one microbatch in all chunks of a
            rank, so one chunk of v counts 1/v. None for what the schedule needs. A schedule that needs more is refused;
            some use a larger limit for more warmup forwards.
        min_pending_weights: this many Ws of a rank are held back until its last Bs, so that overlap windows have work.
            Less where `max_pending_weights` is less.
        max_pending_weights: at most this many Ws of a rank are pending after a B; fewer hold less memory. None for what
            the schedule needs, or 1 if anything is recomputed or offloaded, since recomputed or reloaded activations
            stay in memory until W.
        recompute: whether the activations of a chunk are computed again before its backward; or for each stage.
        offload: the time to copy to host memory what an F saves, divided by the time of that F. Activations are moved
            there if the step does not get longer (`offload_activations`). None to move nothing.
    """

    microbatch_group_size: int | None = None
    max_in_flight: float | None = None
    min_pending_weights: int = 0
    max_pending_weights: int | None = None
    recompute: bool | tuple[bool, ...] = False
    offload: float | None = None

    def __post_init__(self) -> None:
        if isinstance(self.recompute, Iterable):  # a list is true, whatever it says of each stage
            object.__setattr__(self, "recompute", tuple(self.recompute))
        for name in ("min_pending_weights", "max_pending_weights"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is a number of Ws from 0 on, got {getattr(self, name)}.")

    @property
    def recomputes(self) -> bool:
        """Whether any stage recomputes."""
        return any(self.recompute) if isinstance(self.recompute, tuple) else self.recompute

    @property
    def pending_weights_cap(self) -> int | None:
        """`max_pending_weights` if it is set, else its default."""
        is_capped = self.recomputes or self.offload is not None
        return 1 if self.max_pending_weights is None and is_capped else self.max_pending_weights

    def recomputes_stage(self, stage: int) -> bool:
        return self.recompute[stage] if isinstance(self.recompute, tuple) else self.recompute


class Verbs(ABC):
    """The object that a schedule is called with: its rank's part of the pipeline.

    Every verb handles the chunk's next unit, in order, so none takes a microbatch number (`run` may, for R, O and L). A
    unit is a microbatch, or a slice of one if sequences are cut. Forwards take the slices of a microbatch first to
    last, backwards last to first, since later slices attend to earlier ones. A verb that has nothing to do on this rank
    returns at once: the first stage receives no input, and with `forward_only` nothing goes backward. One call too many
    raises ScheduleError.
    """

    def __init__(
        self,
        placement: Placement,
        pp_rank: int,
        pp_size: int,
        num_microbatches: int,
        num_chunks: int,
        forward_only: bool = False,
        settings: Settings | None = None,
        num_slices: int = 1,
    ) -> None:
        self.placement = placement
        self.pp_rank = pp_rank
        self.pp_size = pp_size
        self.num_microbatches = num_microbatches
        self.num_slices = num_slices
        self.num_units = num_microbatches * num_slices
        self.num_chunks = num_chunks
        self.forward_only = forward_only
        self.settings = settings or Settings()
        self.stages = placement.stages(pp_rank, pp_size, num_chunks)
        self._counts = {verb: [0] * num_chunks for verb in VERBS_IN_ORDER}
        counts = [[self.num_units] * num_chunks, *self._counts.values()]
        self._before_and_own = dict(zip(VERBS_IN_ORDER, pairwise(counts)))
        """The counts, by chunk, of the verb before each verb, and its own."""
        optional = [kind for kind in KINDS.values() if kind.is_optional]
        needed = [kind for kind in KINDS.values() if kind.after is not None and not kind.is_optional]
        self._pending: dict[str, deque[tuple[int, int]]] = {kind.name: deque() for kind in needed}
        """The units that may take a kind that follows another: for "W", the only one, those whose B is done. Each is
        (chunk, number of its backward on that chunk); the oldest is first."""
        self._followers = {name: [kind.name for kind in needed if kind.after == name] for name in KINDS}
        self._passed = {kind.name: [0] * num_chunks for kind in optional}
        """How many units have taken an optional kind or were passed over, by kind and chunk. They take it in the order
        of the chunk's backwards."""
        self._verbs = {kind.name: f"{kind.direction}_step" for kind in KINDS.values() if kind.direction is not None}

    def reset(self) -> None:
        """Called when a step begins: set all counters to 0."""
        for counts in (*self._counts.values(), *self._passed.values()):
            counts[:] = [0] * self.num_chunks
        for pending in self._pending.values():
            pending.clear()

    # Facts

    def num_forwards_left(self, chunk: int = 0) -> int:
        """How many forwards of this chunk have still to be run in this step."""
        return self.num_units - self._counts["forward_step"][chunk]

    def num_backwards_left(self, chunk: int = 0) -> int:
        """How many backwards of this chunk have still to be run in this step: 0 with `forward_only`."""
        return 0 if self.forward_only else self.num_units - self._counts["backward_step"][chunk]

    def num_pending_weights(self, chunk: int | None = None) -> int:
        """How many Ws are pending: their B has run, and they have not. Of this chunk, or of the rank."""
        pending = self._pending["W"]
        return len(pending) if chunk is None else [other for other, _ in pending].count(chunk)

    # Verbs

    @abstractmethod
    def recv_forward(self, chunk: int = 0) -> None:
        """Request the next input from the previous stage. It does not wait; `forward_step` does. Over gloo the receive
        may be posted now, over NCCL it is posted later."""

    @abstractmethod
    def run(self, kind_name: str, chunk: int | None = 0, number: int | None = None) -> None:
        """Run the chunk's next action of a kind.

        Args:
            kind_name: a name in `KINDS` (kinds.py).
            chunk: None is for W alone: the oldest pending W of the rank.
            number: for optional kinds (R, O, L): which unit of the chunk, counted in the order of its backwards. None
                for the next.

        Raises:
            ScheduleError: no unit is ready for it.
        """

    @abstractmethod
    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        """Run two actions, each a (kind, chunk), overlapped if the model can run in segments.

        Their outputs may be sent before this returns. The schedule must call `send_forward` and `send_backward` after
        it all the same."""

    def forward_step(self, chunk: int = 0) -> None:
        """F: run the chunk on its next input."""
        self.run("F", chunk)

    @abstractmethod
    def recompute_step(self, chunk: int = 0) -> None:
        """R: recompute the activations of the unit that goes backward next. Called before `recv_backward`, so that it
        runs while the gradient is on its way. It does nothing if the F of that unit kept its activations: the chunk is
        not recomputed, or the F was the action just before this backward. To run an R earlier, call `run("R", chunk)`.
        """

    @abstractmethod
    def send_forward(self, chunk: int = 0) -> None:
        """Send the oldest output that is not yet sent to the next stage. It does not wait."""

    @abstractmethod
    def recv_backward(self, chunk: int = 0) -> None:
        """Request the next output gradient from the next stage. It does not wait; the backward does."""

    def backward_step(self, chunk: int = 0) -> None:
        """BW: the whole backward of the oldest unit in flight."""
        self.run("BW", chunk)

    def backward_input_step(self, chunk: int = 0) -> None:
        """B: the input gradients of the oldest unit in flight. Its W becomes pending.

        Layers defer their weight gradients by `weight_grad.defer`. A layer that does not computes them within B."""
        self.run("B", chunk)

    def backward_weight_step(self, chunk: int | None = None) -> None:
        """W: the weight gradients of the oldest pending W, of this chunk or of the rank."""
        self.run("W", chunk)

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        """F of one chunk and BW of another, overlapped if the model can (`run_pair`)."""
        self.run_pair(("F", forward_chunk), ("BW", backward_chunk))

    @abstractmethod
    def send_backward(self, chunk: int = 0) -> None:
        """Send the oldest input gradient that is not yet sent to the previous stage. It does not wait."""

    @abstractmethod
    def finish(self) -> Any:
        """End the step. Called last: every schedule ends with `return pipe.finish()`.

        Raises:
            ScheduleError: some action or message of the step is missing.
        """

    # Bookkeeping for the two that implement the verbs

    def _advance(self, verb: str, chunk: int) -> int:
        """Count one call of `verb`. Returns its number on this chunk, from 0; `_unit` translates it.

        Raises:
            ScheduleError: the call comes too early, or is one too many.
        """
        before, own = self._before_and_own[verb]
        number = own[chunk]
        if before[chunk] - number < self.num_slices:
            self._check_ready(verb, chunk)
        own[chunk] = number + 1
        return number

    def _unit(self, verb: str, number: int) -> tuple[int, int]:
        """The microbatch and the slice that call `number` of `verb` handles."""
        microbatch, index = divmod(number, self.num_slices)
        return microbatch, self.num_slices - 1 - index if "backward" in verb else index

    def _check_ready(self, verb: str, chunk: int) -> None:
        """Raises ScheduleError if the next call of `verb` comes too early, or is one too many."""
        before, own = self._before_and_own[verb]
        if own[chunk] == self.num_units:
            raise ScheduleError(
                f"rank {self.pp_rank} calls {verb}({chunk}) more often than there are {self._units} ({self.num_units})."
            )
        num_ready = before[chunk]
        if verb == "recv_backward":  # its first slice is the last one that went forward
            num_ready -= num_ready % self.num_slices
        if own[chunk] >= num_ready:
            required = VERBS_IN_ORDER[VERBS_IN_ORDER.index(verb) - 1]
            unit = unit_in_words(*self._unit(verb, own[chunk]), self.num_slices)
            raise ScheduleError(f"rank {self.pp_rank} calls {verb}({chunk}) for {unit} before {required}({chunk}).")

    @property
    def _units(self) -> str:
        return "microbatches" if self.num_slices == 1 else "slices of microbatches"

    def _next_action(self, kind_name: str, chunk: int | None, number: int | None = None) -> tuple[int, int]:
        """Count the next action of a kind. Returns (chunk, k): for F the k-th forward of the chunk, for all other kinds
        its k-th backward."""
        kind = KINDS[kind_name]
        if kind.direction is None:
            chunk, number = self._take_pending(kind, chunk, number)
        else:
            assert chunk is not None
            number = self._advance(self._verbs[kind_name], chunk)
        for name in self._followers[kind_name]:
            self._pending[name].append((chunk, number))
        return chunk, number

    def _take_pending(self, kind: Kind, chunk: int | None, number: int | None = None) -> tuple[int, int]:
        """The unit that takes an action without messages next. Of a chunk it is the one that goes backward first; of
        the whole rank (`chunk` is None) the one that became ready first."""
        if kind.is_optional and chunk is not None:
            next_one = self._next_optional(kind.name, chunk)
            number = next_one if number is None else number
            if next_one <= number < self._num_forwarded(chunk):
                self._passed[kind.name][chunk] = number + 1
                return chunk, number
        pending = self._pending.get(kind.name, deque())
        for index, unit in enumerate(pending):
            if chunk is None or chunk == unit[0]:
                del pending[index]
                return unit
        verb = self._verbs[kind.after or ""]
        counts, whose = (self._counts[verb], "") if chunk is None else ([self._counts[verb][chunk]], " of that chunk")
        raise ScheduleError(
            f"rank {self.pp_rank} calls {kind.verb}({'' if chunk is None else chunk}) but has no deferred {kind.label}"
            f"{whose} (after {sum(counts)} {verb.removesuffix('_step')}s)."
        )

    def _next_optional(self, kind_name: str, chunk: int) -> int:
        """The number of the unit that an optional kind may take next, in the order of the chunk's backwards."""
        return max(self._passed[kind_name][chunk], self._counts["backward_step"][chunk])

    def _num_forwarded(self, chunk: int) -> int:
        """How many units of a chunk have gone forward, counting only microbatches whose slices all have."""
        count = self._counts["forward_step"][chunk]
        return count - count % self.num_slices

    def _check_finished(self) -> None:
        for verb, counts in self._counts.items():
            expected = 0 if self.forward_only and "backward" in verb else self.num_units
            for chunk, count in enumerate(counts):
                if count != expected:
                    raise ScheduleError(
                        f"rank {self.pp_rank} ended its step after {count} calls of {verb}({chunk}); there are "
                        f"{expected} {self._units}."
                    )
        for name, pending in self._pending.items():
            if pending:
                chunk, _ = min(pending)
                number = [other for other, _ in pending].count(chunk)
                without = f"without the {name}s of {number} {self._units} of chunk {chunk}"
                raise ScheduleError(f"rank {self.pp_rank} ended its step {without}.")
