"""The calls of a schedule on one rank, written down."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .kinds import KINDS, PAIR, kind_of
from .placement import Placement
from .rows import Row, column
from .verbs import Action, Verbs, unit_name

__all__ = ["ChannelName", "Event", "PlanRecorder", "record"]

# What waits for what. The message that a verb sends, takes or needs goes forward or backward over a boundary, here
# counted from that above the verb's stage: 0, or -1 for the boundary below it.
TAKEN, SENT = {"forward": -1, "backward": 0}, {"forward": 0, "backward": -1}
VERBS = [*((kind.verb, kind) for kind in KINDS.values()), *((verb, KINDS[name]) for verb, name in PAIR.items())]
MESSAGES = {
    **{f"recv_{way}": (way, boundary) for way, boundary in TAKEN.items()},
    **{verb: (kind.message, TAKEN[kind.message]) for verb, kind in VERBS if kind.message is not None},
    **{f"send_{way}": (way, boundary) for way, boundary in SENT.items()},
}

# The verbs that count as another one, since a microbatch's forward or backward is one or the other.
COUNTED_AS = {verb: f"{kind.message}_step" for verb, kind in VERBS if kind.message is not None}

FIRST_HALF, SECOND_HALF = PAIR
WORDS = (*MESSAGES, *(verb for verb, kind in VERBS if kind.message is None))


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
        kind, boundary = MESSAGES[self.verb]
        return ChannelName(kind, self.stage + boundary)

    @property
    def message(self) -> tuple[ChannelName, int, int]:
        """The channel, the microbatch and the slice: the same for a send, its receive, and what needs it."""
        return self.channel, self.microbatch, self.slice

    def __str__(self) -> str:
        """`1RECV_F0` is the receive of stage 1's input of microbatch 0, `1SEND_B0` the send of its gradient."""
        action = self.action
        if action is not None:
            return str(action)
        letter = "F" if self.is_forward else "B"
        unit = unit_name(self.microbatch, self.slice)
        return f"{self.stage}{self.verb.partition('_')[0].upper()}_{letter}{unit}"


def _recorded(verb: str) -> Any:
    """The method that writes down calls of `verb`."""
    is_backward = "backward" in verb
    counted_as = COUNTED_AS.get(verb, verb)

    def write_down(self: PlanRecorder, chunk: int = 0) -> None:
        if is_backward and self.forward_only:
            return
        # As `_advance` does, without its call: a large plan has millions.
        before, own, first_code = self._books[verb]
        number = own[chunk]
        if before[chunk] - number < self.num_slices:
            self._check_ready(counted_as, chunk)
        own[chunk] = number + 1
        self._codes.append(first_code + chunk)

    return write_down


class PlanRecorder(Verbs):
    """Writes down the calls of a schedule on one rank: only which they are, since their order tells their units."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `Verbs`."""
        super().__init__(*args, **kwargs)
        self._codes = array("H")
        self._first_code = {verb: k * self.num_chunks for k, verb in enumerate(WORDS)}
        self._books = {
            verb: (*self._before_and_own[COUNTED_AS.get(verb, verb)], self._first_code[verb]) for verb in MESSAGES
        }
        self._pair_ends: list[int] = []
        """How many calls had been written down after each overlapped pair."""

    @property
    def events(self) -> Row[Event]:
        """The calls so far."""
        codes = self._codes
        for end in self._pair_ends:  # what a pair's forward made is sent as soon as it is there
            chunk = codes[end - 2] - self._first_code[FIRST_HALF]
            if end < len(codes) and codes[end] == self._first_code["send_forward"] + chunk:
                codes[end - 1], codes[end] = codes[end], codes[end - 1]
        words = [(verb, info.index) for verb in WORDS for info in self.stages]
        return Row(Event, words, codes, self._number(words), self.num_slices)

    def _number(self, words: Sequence[tuple[str, int]]) -> array[int]:
        """The units of all calls."""
        codes = np.asarray(self._codes)
        first = self._first_code
        counted_as = [first[COUNTED_AS.get(verb, verb)] + chunk for verb in WORDS for chunk in range(self.num_chunks)]
        numbers = _num_equal_before(np.array(counted_as)[codes])
        for verb, after in ((verb, KINDS[kind.after].verb) for verb, kind in VERBS if kind.after is not None):
            for chunk in range(self.num_chunks):  # as Ws come in the order of the Bs that deferred them
                following = np.flatnonzero(codes == first[verb] + chunk)
                numbers[following] = numbers[codes == first[after] + chunk][: len(following)]
        if self.num_slices > 1:
            for code, (verb, _) in enumerate(words):
                microbatches, parts = self._unit(verb, numbers[codes == code])
                numbers[codes == code] = microbatches * self.num_slices + parts
        return column("i", numbers)

    recv_forward = _recorded("recv_forward")
    forward_step = _recorded("forward_step")
    send_forward = _recorded("send_forward")
    recv_backward = _recorded("recv_backward")
    backward_step = _recorded("backward_step")
    send_backward = _recorded("send_backward")
    _backward_input_step = _recorded("backward_input_step")
    _overlapped_forward_step, _overlapped_backward_step = map(_recorded, PAIR)

    def backward_input_step(self, chunk: int = 0) -> None:
        self._backward_input_step(chunk)
        if not self.forward_only:
            self._deferred.append((chunk, self._counts["backward_step"][chunk] - 1))

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        if not self.forward_only:
            self._check_ready("backward_step", backward_chunk)
        self._overlapped_forward_step(forward_chunk)
        self._overlapped_backward_step(backward_chunk)
        if not self.forward_only:
            self._pair_ends.append(len(self._codes))

    def backward_weight_step(self, chunk: int | None = None) -> None:
        if not self.forward_only:
            chunk, _ = self._advance_weight(chunk)
            self._codes.append(self._first_code["backward_weight_step"] + chunk)

    def finish(self) -> None:
        self._check_finished()


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
    """By item, how many of those before it are equal to it."""
    order = np.argsort(values, kind="stable")
    sizes = np.bincount(values)
    numbers = np.empty_like(order)
    numbers[order] = np.arange(len(order)) - np.repeat(sizes.cumsum() - sizes, sizes)
    return numbers
