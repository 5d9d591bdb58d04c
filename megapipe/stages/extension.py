"""The hooks by which an option of the config takes part in a step.

In each step a new instance is made of the extension of each option that is set, whose module is imported, or whose kind
of action is in the plan (`config.OPTIONS`). Most of its methods are called when the step begins, with something of the
step (a function, the monitor), and return it or a wrapper of it: so a method that is not overridden costs a step
nothing, and the core knows no option by name.
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
"""A function that runs one kind of action on one stage. It is called with the unit."""


class Extension:
    """One option in one step. A subclass overrides the methods that it needs. Wrappers of several options are nested in
    the order of `config.OPTIONS`, the last one outermost.

    Args:
        get_plan: returns the plan of the schedule.
        watchdog: of the pipeline; None if that has one rank.
    """

    def __init__(
        self, config: StepConfig, get_plan: Callable[[], Plan], pp_rank: int, watchdog: Watchdog | None
    ) -> None:
        self.config = config
        self.get_plan = get_plan
        self.pp_rank = pp_rank
        self.watchdog = watchdog

    def takes_part(self, call: Call) -> bool:
        """Called first in each step. Returns whether the option has something to do in it; no other method is called if
        not.

        Raises:
            ValueError, TypeError: the option cannot be used in this call.
        """
        return True

    def cut(self, call: Call) -> tuple[list[SequenceSlice], type[Stage]] | None:
        """Called when a runner is made. Returns the slices that each sequence is cut into and the class of the stages
        that run them; None if the option does not cut sequences."""
        return None

    def begin(self, call: Call) -> AbstractContextManager[Any] | None:
        """Called before the schedule's loops. Returns a context to run them in, or None."""
        return None

    def forward_step(self, stage: Stage, function: Callable[..., Any]) -> Callable[..., Any]:
        """Called for each stage with its forward_step_func. Returns it, or a wrapper of it."""
        return function

    def kinds(self, stage: Stage) -> Mapping[str, ActionFunction]:
        """Called for each stage. Returns functions for kinds of action that the option implements, by their names."""
        return {}

    def action(self, kind: Kind, stage: Stage, run: ActionFunction) -> ActionFunction:
        """Called for each stage and kind of action. Returns `run`, or a wrapper of it. The wrapper is called when the
        message of the action is there. The F of an overlapped pair is called once for each of its parts; after
        the last one `unit.parts` is None."""
        return run

    def gradient_sync(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Called with the class `runtime.GradientSync`, which is told when gradients become complete. Returns it, or a
        function with the same arguments."""
        return make

    def monitor(self, monitor: Any) -> Any:
        """Called with the step's `runtime.Monitor`, which is told of each action and each wait. Returns it, or a
        wrapper of it."""
        return monitor

    def end(self) -> None:
        """Called after a step that succeeded."""

    hides_gradients = False
    """Whether the option keeps gradients elsewhere than in the `.grad` of parameters until all of them are complete."""
