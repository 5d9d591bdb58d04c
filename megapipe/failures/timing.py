"""How often the ranks of a job look after each other, and how long they wait for each other."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Timing:
    """Times in seconds. A process that wants others sets them before its first step.

    Attributes:
        tick: between two looks of the helper thread; in large jobs more.
        look: between two looks for a failure of another pipeline; in large jobs more.
        beat: between two signs of life.
        for_others: given to the other ranks to say where they are, or to hear of a failure.
        for_mistakes: that a rank waits for the others to hear of its mistake, until it ends the pipeline by it.
        until_abort: given to a main thread to raise, before its process groups are aborted.
        until_alarm: until a store that does not answer is asked over another connection, then between two questions.
        for_status: that the store may take to answer `megapipe status`.
        beyond_limit: that a transport waits longer than the watchdog, which says where every rank is.
    """

    tick: float = 0.25
    look: float = 1.0
    beat: float = 5.0
    for_others: float = 3.0
    for_mistakes: float = 10.0
    until_abort: float = 3.0
    until_alarm: float = 5.0
    for_status: float = 5.0
    beyond_limit: float = 60.0


TIMING = Timing()
"""The times of this process."""
