"""Our function in the place of Megatron's, for trainers that are packages which nobody edits."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any

from ...plan import AnySchedule, find_schedule
from ...schedules import ForwardBackward, get_forward_backward_func
from .stages import at_its_stage, has_last_stage_in_front

NAME = "get_forward_backward_func"
PLACES = ("megatron.core.pipeline_parallel", "megatron.core.pipeline_parallel.schedules")
"""The modules that trainers import the function from."""


class Installed:
    """Stands where Megatron's function was, and is that one again behind `uninstall`, also for modules that have
    imported it meanwhile. As a context manager it uninstalls itself."""

    def __init__(self, megatrons: Callable[..., Any]) -> None:
        functools.update_wrapper(self, megatrons)
        self.megatrons = megatrons
        self.is_on = False
        self.schedule: AnySchedule | None = None

    def __call__(self, *sizes: Any, **options: Any) -> Any:
        return self._choose(*sizes, **options) if self.is_on else self.megatrons(*sizes, **options)

    def _choose(self, pp_size: Any = None, vp_size: Any = None, schedule_pg_collection: Any = None) -> Any:
        chosen = get_forward_backward_func(self.schedule, vp_size, schedule_pg_collection, pp_size=pp_size)
        return functools.partial(_run_at_its_stages, chosen) if has_last_stage_in_front(chosen) else chosen

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *error: object) -> None:
        uninstall()


_stand_in = functools.cache(Installed)  # one for each, so that who has imported it before an `uninstall` has it again


def install(schedule: AnySchedule | None = None) -> Installed:
    """Let trainers that import `get_forward_backward_func` from Megatron get megapipe's. Call it in every process,
    before the trainer is imported. A second call changes the schedule.

    Args:
        schedule: for all of the process's steps, as `get_forward_backward_func` takes it. None takes the environment
            variable MEGAPIPE_SCHEDULE, and without it the schedule that Megatron would take. For those in a V the
            trainer has to build its chunks by `build_model_chunks` or `at_its_stage`: steps refuse others. Its forward
            steps are told by themselves where they are.

    Returns:
        A context manager, behind which Megatron's function is back. It need not be entered.

    Raises:
        ImportError: megatron-core is not installed.
        RuntimeError: modules have imported Megatron's function already, and would go on to call it. They are named.
        ValueError: there is no such schedule.
    """
    if schedule is not None:
        find_schedule(schedule)
    places = [importlib.import_module(place) for place in PLACES]
    installed = getattr(places[0], NAME)
    if not isinstance(installed, Installed):
        if holders := _holders(installed):
            raise RuntimeError(
                f"{', '.join(holders)} imported {NAME} from Megatron before megapipe was installed, and would go on to "
                "call Megatron's: call install() before that import, in every process (Ray: worker_process_setup_hook)."
            )
        installed = _stand_in(installed)
        for place in places:
            setattr(place, NAME, installed)
    installed.is_on, installed.schedule = True, schedule
    return installed


def _run_at_its_stages(schedule: ForwardBackward, forward_step_func: Any, *args: Any, **options: Any) -> list[Any]:
    """A step in a V, whose forwards ask Megatron where they are."""
    return schedule(at_its_stage(forward_step_func, schedule), *args, **options)


def uninstall() -> None:
    """Let Megatron's function be called again, by modules too that have imported megapipe's in its place. Nothing where
    it is not installed."""
    for place in [importlib.import_module(place) for place in PLACES if place in sys.modules]:
        installed = getattr(place, NAME)
        if isinstance(installed, Installed):
            installed.is_on = False
            setattr(place, NAME, installed.megatrons)


def _holders(function: Callable[..., Any]) -> list[str]:
    """The modules that have a function among their names, under whatever name, but for its own places."""
    modules = {name: module for name, module in sys.modules.items() if module is not None and name not in PLACES}
    found = [name for name, module in modules.items() if any(one is function for one in _values(module))]
    return sorted(found)


def _values(module: Any) -> list[Any]:
    return list(getattr(module, "__dict__", {}).values())
