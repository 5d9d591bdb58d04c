"""The language of schedules: the verbs a schedule may say, and the facts it may ask for.

A schedule is a function of one argument that speaks these verbs. Two classes implement them: `Pipeline` does the
work, `PlanRecorder` writes the calls down. So the hand-written loop is the only source of truth for both.
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

# What a microbatch goes through on a chunk, in this order. A kind of action counts as the step of its message, since a
# microbatch's backward is one or the other, and `forward_backward_step` as both steps.
VERBS_IN_ORDER = ("recv_forward", "forward_step", "send_forward", "recv_backward", "backward_step", "send_backward")


class ScheduleError(ValueError):
    """A schedule says its verbs in an order that cannot work."""


class Action(NamedTuple):
    """One computation: `2F0` is the forward of microbatch 0 through stage 2, `2B0` its backward, `2W0` its
    weight-gradient pass where that is deferred. Where sequences are cut, `2F0` is that of the first slice, `2F0.1` that
    of the second."""

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
    """A unit in words, for messages."""
    return f"microbatch {microbatch}" if num_slices == 1 else f"slice {slice} of microbatch {microbatch}"


@dataclass(frozen=True)
class Settings:
    """Settings of schedules, the same on all ranks. A schedule ignores those that it does not know.

    Attributes:
        microbatch_group_size: how many microbatches interleaved schedules run through a chunk before they turn to the
            next; None for the number of ranks.
        max_in_flight: most microbatches of a whole rank that any rank may have in flight, from F to W; None for the
            schedule's own. Some schedules trade memory for speed within it; the others are refused if they need more.
        min_pending_weights: as many Ws of a rank wait until its last B is done: work for overlap windows.
        max_pending_weights: most Ws of a rank that wait after a B; None for the schedule's own, or 1 where anything is
            recomputed or moved to host memory, since what is back lives until its W. Fewer hold less memory.
        recompute: whether the activations of a chunk are computed again before its backward; or for each stage.
        offload: the time to copy to host memory what an F saves, over the time of that F: activations are moved there
            where that takes no time of the step's (`offload_activations`). None where they stay.
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
        """Whether any stage does."""
        return any(self.recompute) if isinstance(self.recompute, tuple) else self.recompute

    @property
    def pending_weights_cap(self) -> int | None:
        """`max_pending_weights`, or its default."""
        is_capped = self.recomputes or self.offload is not None
        return 1 if self.max_pending_weights is None and is_capped else self.max_pending_weights

    def recomputes_stage(self, stage: int) -> bool:
        return self.recompute[stage] if isinstance(self.recompute, tuple) else self.recompute


class Verbs(ABC):
    """What a schedule sees of its pipeline.

    Every verb handles the chunk's next unit of work, in order, so none takes a number. A unit is a microbatch, or one
    of the slices that its sequences are cut into: forwards take the slices of a microbatch first to last, backwards
    last to first, since a slice is attended to by those after it. A verb that has nothing to do returns at once: there
    is no message where the neighbouring stage does not exist, and with `forward_only` nothing goes backward.
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
        """The units that a kind which follows another may take: their chunk and their number in the order of the
        chunk's backwards. The order is that in which they became ready."""
        self._followers = {name: [kind.name for kind in needed if kind.after == name] for name in KINDS}
        self._passed = {kind.name: [0] * num_chunks for kind in optional}
        """Units of each chunk, in the order of its backwards, that an optional kind has taken or left out."""
        self._verbs = {kind.name: f"{kind.direction}_step" for kind in KINDS.values() if kind.direction is not None}

    def reset(self) -> None:
        """Count from nought, for another step."""
        for counts in (*self._counts.values(), *self._passed.values()):
            counts[:] = [0] * self.num_chunks
        for pending in self._pending.values():
            pending.clear()

    # Facts

    def num_forwards_left(self, chunk: int = 0) -> int:
        """Forwards of this chunk still to be run in this step, in units."""
        return self.num_units - self._counts["forward_step"][chunk]

    def num_backwards_left(self, chunk: int = 0) -> int:
        """Backwards of this chunk still to be run in this step, in units: none with `forward_only`."""
        return 0 if self.forward_only else self.num_units - self._counts["backward_step"][chunk]

    def num_pending_weights(self, chunk: int | None = None) -> int:
        """Deferred weight-gradient passes (W) that are still to be run: of this chunk, or of all."""
        pending = self._pending["W"]
        return len(pending) if chunk is None else [other for other, _ in pending].count(chunk)

    # Verbs

    @abstractmethod
    def recv_forward(self, chunk: int = 0) -> None:
        """Take the next forward input from the previous stage. `forward_step` waits for it, this does not."""

    @abstractmethod
    def run(self, kind_name: str, chunk: int | None = 0, number: int | None = None) -> None:
        """Run the chunk's next action of a kind (kinds.py).

        Args:
            chunk: None for the unit that has waited longest, where the kind follows another and is not optional.
            number: which unit of the chunk's an optional kind takes, in the order of its backwards; None for the next.
        """

    @abstractmethod
    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        """Run the next actions of two kinds and chunks, overlapped where the model can. What they make is sent when it
        is there, which may be before this returns; `send_forward` and `send_backward` follow all the same."""

    def forward_step(self, chunk: int = 0) -> None:
        """F: run the chunk on its next input."""
        self.run("F", chunk)

    @abstractmethod
    def recompute_step(self, chunk: int = 0) -> None:
        """R: compute the activations of the unit that goes backward next again, before its gradient is waited for.
        Nothing where its F has kept them: where the chunk is not to be recomputed, and where the F was the rank's last
        action. A schedule that wants one earlier says `run("R", chunk)`."""

    @abstractmethod
    def send_forward(self, chunk: int = 0) -> None:
        """Send the oldest output not sent yet to the next stage. Does not wait."""

    @abstractmethod
    def recv_backward(self, chunk: int = 0) -> None:
        """Take the next output gradient from the next stage. `backward_step` waits for it, this does not."""

    def backward_step(self, chunk: int = 0) -> None:
        """B and W together: the gradients of the oldest microbatch in flight."""
        self.run("BW", chunk)

    def backward_input_step(self, chunk: int = 0) -> None:
        """B: the input gradient of the oldest microbatch in flight. Its weight-gradient pass (W) is deferred."""
        self.run("B", chunk)

    def backward_weight_step(self, chunk: int | None = None) -> None:
        """W: the weight gradients deferred longest, of this chunk or of all."""
        self.run("W", chunk)

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        """F of one chunk and B and W of another, overlapped where the model can (`run_pair`)."""
        self.run_pair(("F", forward_chunk), ("BW", backward_chunk))

    @abstractmethod
    def send_backward(self, chunk: int = 0) -> None:
        """Send the oldest input gradient not sent yet to the previous stage. Does not wait."""

    @abstractmethod
    def finish(self) -> Any:
        """End the step. Every schedule returns what this returns."""

    # Bookkeeping for the two that implement the verbs

    def _advance(self, verb: str, chunk: int) -> int:
        """Count one call of `verb` and return its number. `_unit` tells what it is about."""
        before, own = self._before_and_own[verb]
        number = own[chunk]
        if before[chunk] - number < self.num_slices:
            self._check_ready(verb, chunk)
        own[chunk] = number + 1
        return number

    def _unit(self, verb: str, number: int) -> tuple[int, int]:
        """The microbatch and the slice of a call of `verb`."""
        microbatch, index = divmod(number, self.num_slices)
        return microbatch, self.num_slices - 1 - index if "backward" in verb else index

    def _check_ready(self, verb: str, chunk: int) -> None:
        """Raises ScheduleError where the next call of `verb` comes too early, or is one too many."""
        before, own = self._before_and_own[verb]
        if own[chunk] == self.num_units:
            raise ScheduleError(
                f"rank {self.pp_rank} calls {verb}({chunk}) more often than there are {self._units} ({self.num_units})."
            )
        num_ready = before[chunk]
        if verb == "recv_backward":  # which begins with the slice that went forward last
            num_ready -= num_ready % self.num_slices
        if own[chunk] >= num_ready:
            required = VERBS_IN_ORDER[VERBS_IN_ORDER.index(verb) - 1]
            unit = unit_in_words(*self._unit(verb, own[chunk]), self.num_slices)
            raise ScheduleError(f"rank {self.pp_rank} calls {verb}({chunk}) for {unit} before {required}({chunk}).")

    @property
    def _units(self) -> str:
        return "microbatches" if self.num_slices == 1 else "slices of microbatches"

    def _next_action(self, kind_name: str, chunk: int | None, number: int | None = None) -> tuple[int, int]:
        """Count the next action of a kind. Returns its chunk, and its number among those of its kind's order: that of
        forwards or, for all others, that of backwards."""
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
        """The unit that goes backward first of those of a chunk; of all, the one that has waited longest."""
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
        """The unit of a chunk, in the order of its backwards, that an optional kind may take next."""
        return max(self._passed[kind_name][chunk], self._counts["backward_step"][chunk])

    def _num_forwarded(self, chunk: int) -> int:
        """The units of a chunk that have gone forward, those of whole microbatches: they go backward in this order."""
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
