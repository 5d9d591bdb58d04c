"""A schedule on paper: recorded, checked, simulated and saved, without tensors and without process groups."""

from typing import TYPE_CHECKING

from ..first_use import names_on_first_use

if TYPE_CHECKING:
    from .files import load_plan, load_stage_bytes, parse_json, read_text
    from .finding import AnySchedule, find_schedule
    from .gathering import gathered_chunks
    from .kinds import FORWARD, KINDS, LOAD, OFFLOAD, RECOMPUTE, WEIGHTS, Kind
    from .making import make_plan
    from .measured import RankStep, Wait
    from .memory import RankBytes, StageBytes, held_changes
    from .offloading import offload_activations
    from .placement import Placement, StageInfo, loop, v_shape
    from .plan import Plan, plan_of
    from .planned import loops_of
    from .recorder import ChannelName, Event, record
    from .registry import ELSEWHERE, Schedule, nearest, register, schedule_names
    from .simulation import Costs, Simulation, Span, play, simulate
    from .standstill import Standstill, record_partly, stand_still, whole_units
    from .verbs import Action, ScheduleError, Settings, Verbs, actions_of, unit_in_words
    from .weight_placement import place_weights

__all__ = [
    "Action",
    "Costs",
    "Placement",
    "Plan",
    "RankBytes",
    "Schedule",
    "ScheduleError",
    "Settings",
    "Simulation",
    "Span",
    "StageBytes",
    "StageInfo",
    "Verbs",
    "find_schedule",
    "load_plan",
    "load_stage_bytes",
    "loop",
    "make_plan",
    "offload_activations",
    "schedule_names",
    "simulate",
    "v_shape",
]

__getattr__, __dir__ = names_on_first_use(__name__)
