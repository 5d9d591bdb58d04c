"""Failures of this process's pipelines, as all that stands around their steps sees them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["PipelineError", "check_failures", "watched"]


class PipelineError(RuntimeError):
    """A step failed because of another rank, or waited too long. Says which rank, where it was, and why."""


class Watched(Protocol):
    """A pipeline of this process whose steps are watched."""

    def watch(self) -> None:
        """What the helper thread calls again and again."""

    def settle(self) -> None:
        """Wait until all messages have arrived; raise what another rank's failure has left for this one."""


watched: set[Watched] = set()
"""Every pipeline of this process, from its first step until its process group is gone."""


def check_failures() -> None:
    """Wait until all messages to this process have arrived, and raise what any of its pipelines has left for its main
    thread. To be called before what changes weights, or waits for all ranks: the gradients of a step that failed
    elsewhere may be garbage, and a rank that failed does not come."""
    for pipeline in list(watched):
        pipeline.settle()
