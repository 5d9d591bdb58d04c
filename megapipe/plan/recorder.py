"""The calls of a schedule on one rank, written down."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .kinds import KINDS, LOAD, OFFLOAD, RECOMPUTE, Kind, kind_of, overlapped
from .placement import Placement
from .rows import Row, column
from .verbs import Action, ScheduleError, Verbs, unit_name

__all__ = ["ChannelName", "Event", "PlanRecorder", "record"]

TAKEN, SENT = {"forward": -1, "backward": 0}, {"forward": 0, "backward": -1}
"""The boundary of the message that a verb takes or needs, and of the one that it sends, counted from that above the
verb's stage."""


class ChannelName(NamedTuple):
    """One way over one boundary, as both of its ends call it."""

    kind: str
    """"forward" for outputs, "backward" for their gradients, "header" for the shapes that precede an output."""
    boundary: int
    """Boundary b lies between the stages b and b + 1."""


class Event(NamedTuple):
    """One call of a verb."""

    verb: str
    stage: int
    microbatch: int
    slice: int = 0

    @property
    def action(self) -> Action | None:
        """The computation, if it is one."""
        kind = kind_of(self.verb)
        return None if kind is None else Action(self.stage, kind.name, self.microbatch, self.slice)

    @property
    def sends(self) -> bool:
        return self.verb.startswith("send")

    @property
    def is_forward(self) -> bool:
        return "forward" in self.verb

    @property
    def channel(self) -> ChannelName:
        """The channel of the message that this sends, takes or needs.

        At the ends of the pipeline it is one of a boundary that does not exist.
        """
        computed = kind_of(self.verb)
        kind = self.verb.partition("_")[2] if computed is None else computed.message
        assert kind is not None, f"{self} needs no message"
        return ChannelName(kind, self.stage + (SENT if self.sends else TAKEN)[kind])

    @property
    def message(self) -> tuple[ChannelName, int, int]:
        """The channel, the microbatch and the slice: the same for a send, its receive, and what needs it."""
        return self.channel, self.microbatch, self.slice

    def __str__(self) -> str:
        """`1RECV_F0` is the receive of stage 1's input of microbatch 0, `1SEND_B0` the send of its gradient."""
        action = self.action
        if action is not None:
            return str(action)
        way, _, message = self.verb.partition("_")
        return f"{self.stage}{way}_{message[0]}".upper() + unit_name(self.microbatch, self.slice)


class PlanRecorder(Verbs):
    """Writes down the calls of a schedule on one rank: only which they are, since mostly their order tells their
    units."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `Verbs`."""
        super().__init__(*args, **kwargs)
        self._codes = array("H")
        self._numbers_of_followers = array("i")
        """The units of calls whose kind follows another one, which take them in an order of their own."""
        messages = {f"{verb}_{way}": f"{verb}_{way}" for way in TAKEN for verb in ("recv", "send")}
        counted = {kind.verb: self._steps.get(kind.name) for kind in KINDS.values()}
        halves = {overlapped(kind): counted[kind.verb] for kind in KINDS.values()}
        self._counted_as: dict[str, str | None] = {**messages, **counted, **halves}
        """The verb that each verb counts as, since a microbatch's forward or backward is one or the other; None where
        its kind follows another one."""
        self._first_code = {verb: k * self.num_chunks for k, verb in enumerate(self._counted_as)}
        self._books = {
            verb: (*self._before_and_own[counted_as], self._first_code[verb])
            for verb, counted_as in self._counted_as.items()
            if counted_as is not None and not (self.forward_only and "backward" in counted_as)
        }
        self._away: set[tuple[int, int]] = set()
        """Units whose activations are in host memory: their chunks, and their places among its backwards."""
        self._recomputed = [self.settings.recomputes_stage(info.index) for info in self.stages]
        self._pair_ends: list[int] = []
        """How many calls had been written down after each overlapped pair."""

    @property
    def events(self) -> Row[Event]:
        """The calls so far."""
        codes = self._codes
        words = [(verb, info.index) for verb in self._counted_as for info in self.stages]
        for end in self._pair_ends:  # what the first of a pair made is sent as soon as it is there
            verb, stage = words[codes[end - 2]]
            kind = kind_of(verb)
            if kind is not None and end < len(codes) and words[codes[end]] == (f"send_{kind.message}", stage):
                codes[end - 1], codes[end] = codes[end], codes[end - 1]
        return Row(Event, words, codes, self._number(words), self.num_slices)

    def _number(self, words: Sequence[tuple[str, int]]) -> array[int]:
        """The units of all calls."""
        codes = np.asarray(self._codes)
        first, chunks = self._first_code, range(self.num_chunks)
        counted_as = [first[own or verb] + chunk for verb, own in self._counted_as.items() for chunk in chunks]
        numbers = _num_equal_before(np.array(counted_as)[codes])
        follows = np.array([own is None for own in self._counted_as.values() for _ in chunks])
        numbers[follows[codes]] = self._numbers_of_followers
        if self.num_slices > 1:
            for code, (verb, _) in enumerate(words):
                microbatches, parts = self._unit(self._counted_as[verb] or "backward", numbers[codes == code])
                numbers[codes == code] = microbatches * self.num_slices + parts
        return column("i", numbers)

    def run(self, kind: str, chunk: int | None = 0, number: int | None = None) -> None:
        self._run(KINDS[kind], KINDS[kind].verb, chunk, number)

    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        for name, chunk in (first, second):
            self._run(KINDS[name], overlapped(KINDS[name]), chunk)
        if not self.forward_only:
            self._pair_ends.append(len(self._codes))

    def recompute_step(self, chunk: int = 0) -> None:
        if self._recomputed[chunk] and self.num_backwards_left(chunk):
            is_early = self._next_optional(RECOMPUTE.name, chunk) > self._counts["backward_step"][chunk]
            if not is_early and not self._was_last_forward(chunk):
                self.run(RECOMPUTE.name, chunk)

    def _was_last_forward(self, chunk: int) -> bool:
        """Whether the rank's last action is the F of the unit that goes backward next."""
        forward, backward = (self._counts[f"{way}_step"][chunk] for way in ("forward", "backward"))
        if self._unit("forward", forward - 1) != self._unit("backward", backward):
            return False
        first = [self._first_code[verb] + chunk for verb in ("forward_step", "send_forward")]
        return list(self._codes[-2:]) == first

    def recv_forward(self, chunk: int = 0) -> None:
        self._write("recv_forward", chunk)

    def send_forward(self, chunk: int = 0) -> None:
        self._write("send_forward", chunk)

    def recv_backward(self, chunk: int = 0) -> None:
        self._write("recv_backward", chunk)

    def send_backward(self, chunk: int = 0) -> None:
        self._write("send_backward", chunk)

    def finish(self) -> None:
        self._check_finished()

    def _run(self, kind: Kind, verb: str, chunk: int | None, number: int | None = None) -> None:
        if kind.message is not None:
            assert chunk is not None
            number = self._write(verb, chunk)
            if self._away and not kind.is_forward:
                self._check_here(verb, chunk, number)
        elif not self.forward_only:
            chunk, number = self._take_pending(kind, chunk, number)
            self._move(kind, chunk, number)
            self._codes.append(self._first_code[verb] + chunk)
            self._numbers_of_followers.append(number)
        else:
            return
        if number is not None and self._followers[kind.name]:
            self._note_ready(kind.name, chunk, number)

    def _move(self, kind: Kind, chunk: int, number: int) -> None:
        """Follow the activations of a unit, in the order of the chunk's backwards, to host memory and back."""
        if kind is OFFLOAD:
            self._away.add((chunk, number))
        elif kind is LOAD:
            if (chunk, number) not in self._away:
                raise ScheduleError(f"rank {self.pp_rank} calls load_step({chunk}) for what is not in host memory.")
            self._away.remove((chunk, number))
        elif self._away:
            self._check_here(kind.verb, chunk, number)

    def _check_here(self, verb: str, chunk: int, number: int | None) -> None:
        if (chunk, number) in self._away:
            raise ScheduleError(
                f"rank {self.pp_rank} calls {verb}({chunk}) for activations that are in host memory: call "
                f"load_step({chunk}) first."
            )

    def _write(self, verb: str, chunk: int) -> int | None:
        """Write down a call. Returns its number; None where the step has no backward."""
        book = self._books.get(verb)
        if book is None:
            return None
        before, own, first_code = book
        number = own[chunk]
        if before[chunk] - number < self.num_slices:
            self._check_ready(self._counted_as[verb] or verb, chunk)
        own[chunk] = number + 1
        self._codes.append(first_code + chunk)
        return number


def record(loops: Callable[[Verbs], Any], placement: Placement, pp_size: int, *sizes: Any) -> list[Row[Event]]:
    """The calls of a schedule's loops on each rank.

    Args:
        sizes: the arguments of `Verbs` behind `pp_size`.
    """
    recorders = [PlanRecorder(placement, rank, pp_size, *sizes) for rank in range(pp_size)]
    for recorder in recorders:
        loops(recorder)
        recorder.finish()  # again, for loops that do not
    return [recorder.events for recorder in recorders]


def _num_equal_before(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How many of those before each item are equal to it."""
    order = np.argsort(values, kind="stable")
    sizes = np.bincount(values)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    return numbers
