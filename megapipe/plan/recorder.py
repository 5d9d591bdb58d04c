"""The calls of a schedule on one rank, written down."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from .kinds import KINDS, LOAD, OFFLOAD, RECOMPUTE, Kind, is_overlapped, kind_of, overlapped
from .placement import Placement
from .verbs import Action, ScheduleError, Verbs, unit_name


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
        return _channel_of(self.verb, self.stage)

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


@functools.cache
def _channel_of(verb: str, stage: int) -> ChannelName:
    computed = kind_of(verb)
    kind = verb.partition("_")[2] if computed is None else computed.direction
    assert kind is not None, f"{verb} needs no message"
    return ChannelName(kind, stage - 1 if (kind == "forward") != verb.startswith("send") else stage)


class PlanRecorder(Verbs):
    """Writes down the calls of a schedule on one rank."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Takes the arguments of `Verbs`."""
        super().__init__(*args, **kwargs)
        self.events: list[Event] = []
        """The calls so far."""
        self._away: set[tuple[int, int]] = set()
        """Units whose activations are in host memory: their chunks, and their places among its backwards."""
        self._recomputed = [self.settings.recomputes_stage(info.index) for info in self.stages]

    def run(self, kind_name: str, chunk: int | None = 0, number: int | None = None) -> None:
        if kind_name not in KINDS:
            raise ScheduleError(f"rank {self.pp_rank} runs a {kind_name!r}, which is none of {', '.join(KINDS)}.")
        self._run(KINDS[kind_name], KINDS[kind_name].verb, chunk, number)

    def run_pair(self, first: tuple[str, int], second: tuple[str, int]) -> None:
        for kind, chunk in ((KINDS[name], chunk) for name, chunk in (first, second)):
            self._run(kind, kind.verb if self.forward_only else overlapped(kind), chunk)

    def recompute_step(self, chunk: int = 0) -> None:
        if self._recomputed[chunk] and self.num_backwards_left(chunk):
            is_early = self._next_optional(RECOMPUTE.name, chunk) > self._counts["backward_step"][chunk]
            if not is_early and not self._was_last_forward(chunk):
                self.run(RECOMPUTE.name, chunk)

    def _was_last_forward(self, chunk: int) -> bool:
        """Whether the rank's last action is the F of the unit that goes backward next."""
        forward, backward = (self._counts[f"{way}_step"][chunk] for way in ("forward", "backward"))
        stage, last_two = self.stages[chunk].index, [event[:2] for event in self.events[-2:]]
        is_last = last_two == [("forward_step", stage), ("send_forward", stage)]
        return is_last and self._unit("forward", forward - 1) == self._unit("backward", backward)

    def recv_forward(self, chunk: int = 0) -> None:
        self._transfer("recv_forward", chunk)

    def send_forward(self, chunk: int = 0) -> None:
        self._transfer("send_forward", chunk)

    def recv_backward(self, chunk: int = 0) -> None:
        self._transfer("recv_backward", chunk)

    def send_backward(self, chunk: int = 0) -> None:
        self._transfer("send_backward", chunk)

    def finish(self) -> list[Event]:
        """End the step. Gives the calls, for who has to see that a schedule returns what this returns."""
        self._check_finished()
        return self.events

    def _run(self, kind: Kind, verb: str, chunk: int | None, number: int | None = None) -> None:
        if self.forward_only and not kind.is_forward:
            return
        if chunk is not None or kind.direction is not None:
            self._check_chunk(kind.verb, chunk)
        chunk, number = self._next_action(kind.name, chunk, number)
        self._move(kind, chunk, number)
        self.events.append(self._event(verb, chunk, number, kind.is_forward))

    def _transfer(self, verb: str, chunk: int) -> None:
        is_forward = verb.endswith("forward")
        if self.forward_only and not is_forward:
            return
        self._check_chunk(verb, chunk)
        event = self._event(verb, chunk, self._advance(verb, chunk), is_forward)
        self.events.insert(len(self.events) - self._is_made_by_first_of_pair(event), event)

    def _is_made_by_first_of_pair(self, event: Event) -> bool:
        """Whether it sends what the first of the last two actions made, a pair: that is sent as soon as it is there."""
        if not event.sends or len(self.events) < 2 or not is_overlapped(self.events[-1].verb):
            return False
        first = self.events[-2]
        return is_overlapped(first.verb) and (first.stage, first.is_forward) == (event.stage, event.is_forward)

    def _check_chunk(self, verb: str, chunk: int | None) -> None:
        if chunk not in range(self.num_chunks):
            raise ScheduleError(
                f"rank {self.pp_rank} calls {verb}({chunk}): it has {self.num_chunks} chunks, counted from 0."
            )

    def _event(self, verb: str, chunk: int, number: int, is_forward: bool) -> Event:
        return Event(verb, self.stages[chunk].index, *self._unit("forward" if is_forward else "backward", number))

    def _move(self, kind: Kind, chunk: int, number: int) -> None:
        """Follow the activations of a unit, in the order of the chunk's backwards, to host memory and back."""
        is_away = (chunk, number) in self._away
        if kind is OFFLOAD:
            self._away.add((chunk, number))
        elif kind is LOAD:
            if not is_away:
                raise ScheduleError(f"rank {self.pp_rank} calls load_step({chunk}) for what is not in host memory.")
            self._away.remove((chunk, number))
        elif is_away and not kind.is_forward:
            raise ScheduleError(
                f"rank {self.pp_rank} calls {kind.verb}({chunk}) for activations that are in host memory: call "
                f"load_step({chunk}) first."
            )


def record(
    loops: Callable[[Verbs], Any], placement: Placement, pp_size: int, *sizes: Any, ranks: Container[int] | None = None
) -> list[list[Event]]:
    """The calls of a schedule's loops on each rank.

    Args:
        sizes: the arguments of `Verbs` behind `pp_size`.
        ranks: whose calls are recorded; others have none. None: those of all.
    """
    recorders = [PlanRecorder(placement, rank, pp_size, *sizes) for rank in range(pp_size)]
    for rank, recorder in enumerate(recorders):
        if ranks is None or rank in ranks:
            returned = loops(recorder)
            if returned is not recorder.finish():  # what is missing in the step comes first
                raise ScheduleError(f"rank {rank} did not end its step with `return pipe.finish()`.")
    return [recorder.events for recorder in recorders]
