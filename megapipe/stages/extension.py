"""The way of an option to take part in a step.

An option that is set has one extension in each runner. Its methods are called when a step begins, and give back what
the step runs: so one that leaves a method as it is costs a step nothing, and the core knows no option by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from ..config import StepConfig
from ..failures import Watchdog
from ..plan import Kind, Plan
from .call import Call

if TYPE_CHECKING:
    from ..slices import SequenceSlice
    from .stage import Stage

ActionFunction = Callable[..., None]
"""Runs an action of one kind on one stage, for a unit."""


class Extension:
    """An option of a runner. It overrides what it needs; several are composed in the order of `config.OPTIONS`, the
    last one outermost.

    Args:
        plan: makes the plan of the schedule.
        watchdog: of the pipeline; None where that has one rank.
    """

    def __init__(self, config: StepConfig, plan: Callable[[], Plan], pp_rank: int, watchdog: Watchdog | None) -> None:
        self.config = config
        self.plan = plan
        self.pp_rank = pp_rank
        self.watchdog = watchdog

    def takes_part(self, call: Call) -> bool:
        """Whether it has something to do in this step. May raise ValueError or TypeError, before anything is done."""
        return True

    def cut(self, call: Call) -> tuple[list[SequenceSlice], type[Stage]] | None:
        """The slices of every sequence, and the class of the stages that run them; None where sequences are whole."""
        return None

    def begin(self, call: Call) -> AbstractContextManager[Any] | None:
        """The loops of a step begin. Returns what goes around them."""
        return None

    def forward_step(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        """Goes around the caller's forward_step_func."""
        return function

    def kinds(self, stage: Stage) -> Mapping[str, ActionFunction]:
        """Actions that it brings, by the names that they have in plans."""
        return {}

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        """Goes around an action, when its message is there."""
        return run

    def gradient_sync(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Makes what is told when gradients become complete (`runtime.GradientSync`)."""
        return make

    def monitor(self, monitor: Any) -> Any:
        """Goes around what accompanies actions and waits (`runtime.Monitor`)."""
        return monitor

    def end(self) -> None:
        """The step has succeeded."""

    hides_gradients = False
    """Whether gradients are elsewhere than in the `.grad` of the chunks' parameters until all of them are complete."""
