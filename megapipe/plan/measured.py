"""A step as it was measured on one rank: the actions of its plan, with the times that they took."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

from .simulation import Span
from .verbs import Action


class Wait(NamedTuple):
    """A wait for a message, in milliseconds."""

    action: Action | None
    """The action that needed it; None for the wait at the end of a step until everything sent has been taken."""
    start: float
    end: float


@dataclass(frozen=True)
class RankStep:
    """One step on one rank, in milliseconds. `spans` and `waits` are in order; an action starts after its wait.

    `pairs` has the places in `spans` of the forwards that ran at once with the backward after them: of such a pair
    only the sum of the two times means anything. `peak_bytes` are the most bytes of tensors made in the step that were
    there at once; 0 where they were not counted.
    """

    begin: float
    end: float
    spans: list[Span]
    waits: list[Wait]
    pairs: tuple[int, ...] = ()
    peak_bytes: int = 0

    @property
    def busy(self) -> float:
        """Time in actions."""
        return sum(span.end - span.start for span in self.spans)

    @property
    def waited(self) -> float:
        """Time in waits for messages."""
        return sum(wait.end - wait.start for wait in self.waits)

    @property
    def host(self) -> float:
        """Time in neither: what the host does between actions."""
        return self.end - self.begin - self.busy - self.waited

    def pauses(self) -> dict[Action, float]:
        """The host's time before each action."""
        waited: defaultdict[Action | None, float] = defaultdict(float)
        for wait in self.waits:
            waited[wait.action] += wait.end - wait.start
        pauses = {}
        clock = self.begin
        for action, start, end in self.spans:
            pauses[action] = start - clock - waited[action]
            clock = end
        return pauses

    def moved(self, offset: float) -> RankStep:
        """The same step on a clock that shows `offset` more."""
        spans = [Span(action, start + offset, end + offset) for action, start, end in self.spans]
        waits = [Wait(action, start + offset, end + offset) for action, start, end in self.waits]
        return RankStep(self.begin + offset, self.end + offset, spans, waits, self.pairs, self.peak_bytes)
