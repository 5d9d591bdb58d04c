"""The calls of a schedule on one rank, written down."""

from __future__ import annotations

from array import array
from typing import Any, NamedTuple

from .rows import Row
from .verbs import PAIR, Action, Verbs, unit_name

__all__ = ["KINDS", "ChannelName", "Event", "PlanRecorder"]

# What waits for what. The message that a verb sends, takes or needs goes forward or backward over a boundary, here
# counted from that above the verb's stage: 0, or -1 for the boundary below it. A W needs no message.
MESSAGES = {
    "recv_forward": ("forward", -1),
    "forward_step": ("forward", -1),
    PAIR[0]: ("forward", -1),
    "send_forward": ("forward", 0),
    "recv_backward": ("backward", 0),
    "backward_step": ("backward", 0),
    "backward_input_step": ("backward", 0),
    PAIR[1]: ("backward", 0),
    "send_backward": ("backward", -1),
}

# The verbs that compute, and the kind of their action.
KINDS = {
    "forward_step": "F",
    "backward_step": "BW",
    "backward_input_step": "B",
    "backward_weight_step": "W",
    PAIR[0]: "F",
    PAIR[1]: "BW",
}

WORDS = (*MESSAGES, "backward_weight_step")


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
        kind = KINDS.get(self.verb)
        return None if kind is None else Action(self.stage, kind, self.microbatch, self.slice)

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

    def write_down(self: PlanRecorder, chunk: int = 0) -> None:
        if not (is_backward and self.forward_only):
            self._numbers.append(self._advance(verb, chunk))  # as _write does, without its call: there are millions
            self._codes.append(self._first_code[verb] + chunk)

    return write_down


class PlanRecorder(Verbs):
    """Writes down the calls of a schedule on one rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `Verbs`."""
        super().__init__(*args, **kwargs)
        self._codes, self._numbers = array("H"), array("i")
        self._first_code = {verb: k * self.num_chunks for k, verb in enumerate(WORDS)}
        self._num_with_pair = -1
        """How many calls had been written down after the last overlapped pair."""

    @property
    def events(self) -> Row[Event]:
        """The calls so far."""
        words = [(verb, info.index) for verb in WORDS for info in self.stages]
        units = self._numbers
        if self.num_slices > 1:
            verbs = [verb for verb, _ in words]
            calls = (self._unit(verbs[code], number) for code, number in zip(self._codes, units))
            units = array("i", [microbatch * self.num_slices + part for microbatch, part in calls])
        return Row(Event, words, self._codes, units, self.num_slices)

    recv_forward = _recorded("recv_forward")
    forward_step = _recorded("forward_step")
    recv_backward = _recorded("recv_backward")
    send_backward = _recorded("send_backward")

    def send_forward(self, chunk: int = 0) -> None:
        self._write("send_forward", chunk, self._advance("send_forward", chunk))
        codes, numbers = self._codes, self._numbers
        if len(codes) == self._num_with_pair + 1 and codes[-3] == self._first_code[PAIR[0]] + chunk:
            for column in (codes, numbers):  # it is sent as soon as it is there
                column[-2], column[-1] = column[-1], column[-2]

    def backward_step(self, chunk: int = 0) -> None:
        self._record_backward("backward_step", chunk, deferred=False)

    def backward_input_step(self, chunk: int = 0) -> None:
        self._record_backward("backward_input_step", chunk, deferred=True)

    def forward_backward_step(self, forward_chunk: int, backward_chunk: int) -> None:
        if not self.forward_only:
            self._check_ready("backward_step", backward_chunk)
        self._write(PAIR[0], forward_chunk, self._advance("forward_step", forward_chunk))
        self._record_backward(PAIR[1], backward_chunk, deferred=False)
        self._num_with_pair = -1 if self.forward_only else len(self._codes)

    def backward_weight_step(self, chunk: int | None = None) -> None:
        if not self.forward_only:
            self._write("backward_weight_step", *self._advance_weight(chunk))

    def finish(self) -> None:
        self._check_finished()

    def _record_backward(self, verb: str, chunk: int, deferred: bool) -> None:
        if not self.forward_only:
            self._write(verb, chunk, self._advance_backward(chunk, deferred))

    def _write(self, verb: str, chunk: int, number: int) -> None:
        self._codes.append(self._first_code[verb] + chunk)
        self._numbers.append(number)
